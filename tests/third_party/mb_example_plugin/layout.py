"""An order and a bucketing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

if TYPE_CHECKING:
    from megatron_buffer.strategies.bucketing import OpenBucket
    from megatron_buffer.strategies.specs import BufferTraits, ParamSpec


@dataclass(frozen=True, kw_only=True)
class BySizeParams:
    """Parameters lie in the order of their size."""

    name: Literal['by_size'] = 'by_size'
    largest_first: bool = True


class BySize:
    """The largest (or smallest) first; among equals, the last registered first."""

    Params = BySizeParams

    def __init__(self, params: BySizeParams) -> None:
        self.params = params

    def layout_order(self, params: Sequence[ParamSpec], buffer: BufferTraits) -> Sequence[int]:
        sign = -1 if self.params.largest_first else 1
        return sorted(range(len(params)), key=lambda i: (sign * params[i].numel_elems, -i))


@dataclass(frozen=True, kw_only=True)
class MaxParamsParams:
    """A bucket holds a limited number of parameters."""

    name: Literal['max_params'] = 'max_params'
    max_params: Annotated[int, Field(ge=1)]


class MaxParams:
    """Closes a bucket behind every so many parameters."""

    Params = MaxParamsParams

    def __init__(self, params: MaxParamsParams) -> None:
        self.params = params

    def cutter(
        self, params: Sequence[ParamSpec], alone: Sequence[bool], bucket_size_elems: int | None
    ) -> Callable[[OpenBucket], bool]:
        if bucket_size_elems is None:
            return lambda bucket: False
        ends: set[int] = set()
        held = 0
        for position in range(len(params)):
            held = 0 if alone[position] else held + 1
            if held == self.params.max_params:
                ends.add(position)
                held = 0
        return lambda bucket: bucket.position in ends
