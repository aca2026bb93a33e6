"""Where Transformer Engine's Python part lies; on no path of the default tests, since Megatron changes with it."""

import os
from pathlib import Path

VERSION = '2.18.0'
ENVIRONMENT_VARIABLE = 'MEGATRON_BUFFER_TE'


def folder() -> Path:
    """The folder that ``scripts/setup.sh --te`` fills, or the one that the environment names."""
    return Path(
        os.environ.get(ENVIRONMENT_VARIABLE) or Path(__file__).resolve().parents[2] / '.venv' / 'te'
    )


def missing() -> str:
    """Why the tests marked ``te`` cannot run here; empty if they can."""
    there = folder()
    if not (there / 'transformer_engine').is_dir():
        return f'needs Transformer Engine in {there}: scripts/setup.sh --te'
    if not list(there.glob(f'transformer_engine-{VERSION}.dist-info')):
        return f'needs Transformer Engine {VERSION} in {there}, found another version: scripts/setup.sh --te'
    return ''
