"""Buffers on paper that layout strategies are tried on, and the search for the smallest that shows a fault.

Plain ``random`` with a seed: the kit needs no library for it. Upstream has no counterpart.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from megatron_buffer.strategies.specs import BufferTraits, ParamSpec

_EDGE_ELEMS = (1, 2, 63, 64, 65, 127, 128, 129, 2**16 - 1, 2**16, 2**16 + 1, 2**21)
_DP_SIZES = (1, 2, 3, 4, 6, 7, 8, 16, 48, 96, 127, 128, 1000, 1024)
_LAYER = (
    ('input_layernorm.weight', 1),
    ('self_attention.linear_qkv.weight', 48),
    ('self_attention.linear_qkv.bias', 3),
    ('self_attention.linear_proj.weight', 16),
    ('mlp.linear_fc1.weight', 64),
    ('mlp.linear_fc2.weight', 64),
    ('mlp.linear_fc2.bias', 1),
)
_PLAIN = BufferTraits()
_MAX_SHRINKS = 400


@dataclass(frozen=True, kw_only=True)
class Example:
    """One buffer and the circumstances it is laid out in.

    Attributes:
        params: Its parameters in registration order.
        bucket_size_elems: Resolved bucket size; None asks for one bucket.
        dist_opt: Whether the distributed optimizer shards it.
        traits: What strategies are told about it.
    """

    params: tuple[ParamSpec, ...]
    bucket_size_elems: int | None = None
    dist_opt: bool = True
    traits: BufferTraits = _PLAIN

    def __str__(self) -> str:
        """The example as somebody would write it down."""
        size = 'one bucket wanted' if self.bucket_size_elems is None else self.bucket_size_elems
        shards = f'dp_size {self.traits.dp_size}' if self.dist_opt else 'no distributed optimizer'
        extras = [
            text
            for text, there in (
                ('high_busbw', self.traits.high_busbw),
                (f'pp_rank {self.traits.pp_rank}', self.traits.pp_rank),
            )
            if there
        ]
        lines = [', '.join([f'bucket_size_elems {size}', shards, *extras])]
        lines += [
            f'{spec.name or "(no name)"}: {spec.numel_elems} elements'
            + (', tied embedding' if spec.shared_embedding else '')
            for spec in self.params
        ]
        return '\n'.join(lines)


def examples(count: int, seed: int = 0) -> list[Example]:
    """``count`` examples, the telling ones first; the same for the same seed."""
    made: list[Example] = []
    for example in _endless(random.Random(seed)):
        if len(made) >= count:
            break
        made.append(example)
    return made


def transformer(layers: int, hidden: int, *, tied_at: str = 'start') -> list[ParamSpec]:
    """Parameters of a transformer stage, named as Megatron names them.

    Args:
        layers: Number of layers.
        hidden: Elements of the smallest parameter.
        tied_at: Where a tied embedding is: ``start`` (first stage), ``end`` (last stage), ``both`` (a
            first stage whose last parameter is one too) or ``none``.
    """
    tied = ParamSpec(
        numel_elems=129 * hidden, name='embedding.word_embeddings.weight', shared_embedding=True
    )
    head = replace_name(tied, 'output_layer.weight')
    body = [
        ParamSpec(numel_elems=hidden * factor, name=f'decoder.layers.{layer}.{name}')
        for layer in range(layers)
        for name, factor in _LAYER
    ]
    norm = ParamSpec(numel_elems=hidden, name='decoder.final_layernorm.weight')
    start = [tied] if tied_at in ('start', 'both') else []
    end = [head] if tied_at in ('end', 'both') else []
    return [*start, *body, norm, *end]


def replace_name(spec: ParamSpec, name: str) -> ParamSpec:
    """The same parameter under another name."""
    return replace(spec, name=name)


def last_stage_of(example: Example) -> Example | None:
    """The last pipeline stage of a model whose first stage is ``example``, if an embedding is tied.

    The same embedding is there, among other parameters, at the other end and under another name, and
    Megatron asks for one bucket.
    """
    tied = next((spec for spec in example.params if spec.shared_embedding), None)
    if tied is None or not example.dist_opt:
        return None
    others = [spec for spec in example.params if not spec.shared_embedding]
    body = [replace(spec, numel_elems=spec.numel_elems + 1) for spec in others[: len(others) // 2]]
    name = 'output_layer.weight' if tied.name else ''
    return replace(
        example,
        params=(*body, replace_name(tied, name)),
        bucket_size_elems=None,
        traits=example.traits._replace(pp_rank=1),
    )


def smallest(example: Example, fails: Callable[[Example], bool]) -> Example:
    """The smallest example that still fails, as far as a greedy search finds it.

    Args:
        example: One that fails.
        fails: Whether an example shows the same fault.
    """
    left = _MAX_SHRINKS
    progress = True
    while progress and left:
        progress = False
        for candidate in _smaller(example):
            left -= 1
            if fails(candidate):
                example, progress = candidate, True
                break
            if not left:
                break
    return example


def _smaller(example: Example) -> Iterator[Example]:
    """Simpler examples, the largest steps first."""
    params = example.params
    for length in (len(params) // 2, len(params) // 4, 1):
        if 0 < length < len(params):
            for start in range(0, len(params), length):
                yield replace(example, params=params[:start] + params[start + length :])
    plain = BufferTraits(dp_size=example.traits.dp_size)
    if example.traits != plain:
        yield replace(example, traits=plain)
    for dp_size in (1, 2, 3):
        if dp_size < example.traits.dp_size:
            yield replace(example, traits=example.traits._replace(dp_size=dp_size))
    if example.bucket_size_elems is not None:
        yield replace(example, bucket_size_elems=None)
        if example.bucket_size_elems > 1:
            yield replace(example, bucket_size_elems=1)
    for index, spec in enumerate(params):
        for numel in (1, spec.numel_elems // 2):
            if 0 < numel < spec.numel_elems:
                small = replace(spec, numel_elems=numel)
                yield replace(example, params=(*params[:index], small, *params[index + 1 :]))
        if spec.shared_embedding:
            plain_spec = replace(spec, shared_embedding=False)
            yield replace(example, params=(*params[:index], plain_spec, *params[index + 1 :]))


def _endless(rng: random.Random) -> Iterator[Example]:
    """First shapes that are known to be difficult, then random ones."""
    tied = ParamSpec(numel_elems=129, name='embedding.weight', shared_embedding=True)
    small = [ParamSpec(numel_elems=n, name=f'layers.{i}.weight') for i, n in enumerate((5, 64, 3))]
    for dp_size in (1, 2, 3, 8):
        traits = BufferTraits(dp_size=dp_size)
        for params in ([small[0]], [tied], [tied, *small], [*small, tied], [tied, *small, tied]):
            yield Example(params=tuple(params), bucket_size_elems=1, traits=traits)
        for where in ('start', 'end', 'both', 'none'):
            stage = tuple(transformer(3, 8 * dp_size + 1, tied_at=where))
            yield Example(params=stage, bucket_size_elems=2000, traits=traits)
            yield Example(params=stage, bucket_size_elems=2000, traits=traits, dist_opt=False)
            yield Example(params=stage, traits=traits)
    while True:
        yield _random(rng)


def _random(rng: random.Random) -> Example:
    if rng.random() < 0.4:
        where = rng.choice(('start', 'end', 'both', 'none'))
        params = transformer(rng.randint(1, 6), rng.choice((1, 8, 64, 100)), tied_at=where)
    else:
        tied = rng.random() < 0.5
        params = [
            ParamSpec(
                numel_elems=_numel(rng),
                name=f'layers.{i // 3}.p{i % 3}.{rng.choice(("weight", "bias"))}{i}',
                shared_embedding=tied and rng.random() < 0.2,
            )
            for i in range(rng.randint(1, 24))
        ]
    if rng.random() < 0.2:  # upstream hands over bare parameters in some places
        params = [replace_name(spec, '') for spec in params]
    return Example(
        params=tuple(params),
        bucket_size_elems=_bucket_size(rng, params),
        dist_opt=rng.random() < 0.75,
        traits=BufferTraits(
            dp_size=rng.choice(_DP_SIZES) if rng.random() < 0.7 else rng.randint(1, 1024),
            high_busbw=rng.random() < 0.15,
            param_bytes=rng.choice((1, 2, 4)),
            grad_bytes=rng.choice((2, 4)),
            pp_rank=rng.choice((0, 0, 1, 3)),
        ),
    )


def _numel(rng: random.Random) -> int:
    return (
        rng.choice(_EDGE_ELEMS) if rng.random() < 0.4 else rng.randint(1, rng.choice((300, 2**18)))
    )


def _bucket_size(rng: random.Random, params: Sequence[ParamSpec]) -> int | None:
    """None, one element, huge, or near where some run of parameters ends."""
    if rng.random() < 0.4:
        return rng.choice((None, 1, 40_000_000, rng.randint(1, 2**20)))
    first, last = sorted((rng.randrange(len(params)), rng.randrange(len(params))))
    run = sum(spec.numel_elems for spec in params[first : last + 1])
    return max(1, run + rng.choice((-1, 0, 1)))
