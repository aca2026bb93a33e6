"""What the planner's figures have in common: colours, sizes, and how they are written."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

# Okabe and Ito's palette, which any colour vision can tell apart.
BLUE, ORANGE, GREEN, PINK = '#0072B2', '#E69F00', '#009E73', '#CC79A7'
SKY, YELLOW, RED, GREY = '#56B4E9', '#F0E442', '#D55E00', '#999999'


@contextlib.contextmanager
def figure(path: str, width_in: float, height_in: float, title: str) -> Iterator[Any]:
    """A figure that is written when the block ends; in an SVG text stays text, and no date is in it."""
    import matplotlib
    from matplotlib.figure import Figure

    style: Any = {'svg.fonttype': 'none', 'svg.hashsalt': 'megatron-buffer', 'font.size': 9}
    with matplotlib.rc_context(style):
        result = Figure(figsize=(width_in, height_in), layout='constrained')
        result.suptitle(title, fontsize=11, x=0.01, ha='left')
        yield result
        metadata = {'Date': None} if path.endswith('.svg') else None
        result.savefig(path, metadata=metadata, dpi=150)


def bare(axes: Any) -> None:
    """Without the frame on top and to the right, and with a grid behind the bars."""
    for side in ('top', 'right'):
        axes.spines[side].set_visible(False)
    axes.set_axisbelow(True)
