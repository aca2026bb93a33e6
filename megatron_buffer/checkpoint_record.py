"""The record of a layout that travels with optimizer state; pure.

Upstream has no counterpart: a checkpoint of its own says how many elements a bucket has, not what they
are.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

_VERSION = 1


class Placed(NamedTuple):
    """A parameter in its bucket.

    Attributes:
        name: Name in the wrapped module.
        start_elems: From the start of the bucket.
        numel_elems: Elements (logical ones).
    """

    name: str
    start_elems: int
    numel_elems: int


class SavedBucket(NamedTuple):
    """A bucket, without its pad at the end.

    Attributes:
        unpadded_elems: ``numel_unpadded`` as upstream records it.
        params: In layout order.
    """

    unpadded_elems: int
    params: tuple[Placed, ...]


class SavedBuffer(NamedTuple):
    """A buffer of one model chunk.

    Attributes:
        dtypes: ``str`` of upstream's key, (storage dtype of the parameters, dtype of the gradients).
        buckets: In layout order.
    """

    dtypes: str
    buckets: tuple[SavedBucket, ...]


@dataclass(frozen=True, kw_only=True)
class StateLayout:
    """How the buffers of one optimizer lie, and which config laid them out."""

    config: str
    """Where the config came from: a shipped name or a file."""
    config_hash: str
    choices: str
    """What the config changes, on one line; 'upstream' if nothing."""
    buffers: tuple[SavedBuffer, ...] = ()

    @property
    def who(self) -> str:
        """The config, for messages."""
        return f'{self.config} (hash {self.config_hash}: {self.choices})'

    def to_text(self, *, with_buffers: bool = True) -> str:
        """JSON; a string, so that nothing on its way through a checkpoint takes it apart.

        Args:
            with_buffers: Without them it is the same on all ranks, pipeline stages included.
        """
        buffers = [
            [buffer.dtypes, [[b.unpadded_elems, _flat(b.params)] for b in buffer.buckets]]
            for buffer in self.buffers
        ]
        record = {
            'version': _VERSION,
            'config': self.config,
            'config_hash': self.config_hash,
            'choices': self.choices,
            **({'buffers': buffers} if with_buffers else {}),
        }
        return json.dumps(record, separators=(',', ':'))

    @classmethod
    def from_text(cls, text: str) -> StateLayout | None:
        """Inverse of :meth:`to_text`; None for a record without buffers, or of another version."""
        record = json.loads(text)
        if record.get('version') != _VERSION or 'buffers' not in record:
            return None
        return cls(
            config=record['config'],
            config_hash=record['config_hash'],
            choices=record['choices'],
            buffers=tuple(
                SavedBuffer(
                    dtypes,
                    tuple(
                        SavedBucket(unpadded, tuple(itertools.starmap(Placed, _triples(flat))))
                        for unpadded, flat in buckets
                    ),
                )
                for dtypes, buckets in record['buffers']
            ),
        )


def _flat(params: Sequence[Placed]) -> list[str | int]:
    return [value for param in params for value in param]


def _triples(flat: Sequence[str | int]) -> Iterator[tuple[str, int, int]]:
    return zip(*(iter(flat),) * 3, strict=True)  # type: ignore[return-value]
