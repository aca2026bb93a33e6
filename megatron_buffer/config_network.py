"""A network of nodes with several GPUs each, as a model of how long a collective takes.

``bucketing: time_optimal`` and ``megatron-buffer simulate`` and ``tune`` ask it. A collective is a startup
time plus bytes over a rate (alpha and beta); rings take as many steps as there are ranks, trees the
logarithm. Imports neither torch nor megatron. Upstream has no counterpart: its rule for the bucket size,
``max(40_000_000, 1_000_000 * dp_size)``, is what a model of rings comes to.
"""

from __future__ import annotations

import dataclasses
import json
import os
import reprlib
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple, cast

from pydantic import Field, ValidationError

from megatron_buffer.config_base import adapter, params_dataclass
from megatron_buffer.config_yaml import did_you_mean, parse, read_file
from megatron_buffer.errors import ConfigError

Kind = Literal['reduce_scatter', 'all_gather', 'all_reduce', 'a2a']
"""A collective, as far as its time is concerned."""

_Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Duration = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Share = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]


class Line(NamedTuple):
    """A time that grows with the size of a bucket: ``alpha_s + beta_s_per_byte * bucket_bytes``."""

    alpha_s: float
    beta_s_per_byte: float

    def seconds(self, num_bytes: float) -> float:
        """The time for a bucket of so many bytes."""
        return self.alpha_s + self.beta_s_per_byte * num_bytes


class Placement(NamedTuple):
    """The ranks of a process group.

    Attributes:
        ranks: How many there are.
        per_node: How many of them share a node.
    """

    ranks: int
    per_node: int

    @property
    def nodes(self) -> int:
        """Nodes that the group spans."""
        return -(-self.ranks // self.per_node)


@params_dataclass
class Network:
    """Nodes, links and what a GPU computes; rates are those of one GPU, in one direction."""

    gpus_per_node: Annotated[int, Field(ge=1)] = 8
    """GPUs of a node; ranks are placed in order, tensor parallelism innermost."""
    launch_us: _Duration = 20.0
    """Microseconds that every collective costs, whatever its size."""
    intra_latency_us: _Duration = 2.0
    """Microseconds of a step between GPUs of a node."""
    intra_gbyte_per_s: _Rate = 450.0
    """Link of a GPU to the others of its node, 10^9 bytes per second."""
    inter_latency_us: _Duration = 8.0
    """Microseconds of a step between nodes."""
    inter_gbit_per_s: _Rate = 400.0
    """Link of a GPU to other nodes, 10^9 bits per second."""
    efficiency: _Share = 0.85
    """Share of both rates that a large collective reaches."""
    algorithm: Literal['auto', 'ring', 'tree'] = 'auto'
    """auto: whichever is faster for the size. Trees exist for all-reduces, and for reduce-scatters and
    gathers of groups with one rank per node."""
    tree_efficiency: _Share = 0.9
    """Rate of a tree, as a share of a ring's."""
    tflops: _Rate = 400.0
    """What a GPU computes in training, 10^12 operations per second."""
    memory_gbyte_per_s: _Rate = 2700.0
    """What it reads and writes in an optimizer step, 10^9 bytes per second."""

    def placement(self, ranks: int, stride: int) -> Placement:
        """Where the ranks of a group are, of which every ``stride``-th rank of the job is one."""
        return Placement(ranks, max(1, min(ranks, self.gpus_per_node // stride)))

    def lines(self, kind: Kind, group: Placement) -> tuple[Line, ...]:
        """How long a collective takes over the bytes of the whole bucket: the least of these lines.

        Args:
            kind: The collective; ``a2a`` takes a reduce-scatter's time.
            group: Its ranks.
        """
        if group.ranks == 1:
            return (Line(0.0, 0.0),)
        nodes, times = group.nodes, 2 if kind == 'all_reduce' else 1
        rate = self.intra_gbyte_per_s * 1e9
        if nodes > 1:  # each GPU of the group that is in a node brings its own link
            rate = min(rate, group.per_node * self.inter_gbit_per_s * 1e9 / 8)
        beta = times * (group.ranks - 1) / group.ranks / (rate * self.efficiency)
        between = nodes - 1
        ring = between * self.inter_latency_us + (group.ranks - nodes) * self.intra_latency_us
        hops = between.bit_length() * self.inter_latency_us
        hops += (group.per_node - 1) * self.intra_latency_us
        lines = {'ring': Line((self.launch_us + times * ring) / 1e6, beta)}
        if kind == 'all_reduce' or (group.per_node == 1 and kind != 'a2a'):
            alpha_us = self.launch_us + times * hops
            lines['tree'] = Line(alpha_us / 1e6, beta / self.tree_efficiency)
        if self.algorithm != 'auto' and self.algorithm in lines:
            return (lines[self.algorithm],)
        return tuple(lines.values())

    def seconds(self, kind: Kind, num_bytes: float, group: Placement) -> float:
        """How long a collective over a bucket of ``num_bytes`` takes; nothing for an empty one."""
        return (
            min(line.seconds(num_bytes) for line in self.lines(kind, group)) if num_bytes else 0.0
        )


_H100 = Network()
PRESETS: Mapping[str, Network] = {
    'h100': _H100,
    'h200': dataclasses.replace(_H100, memory_gbyte_per_s=4000.0),
}
"""Nodes of 8 GPUs that NVLink joins, with a 400 Gb/s link per GPU to other nodes."""


def load_network(source: str, yaml_path: str = '--network') -> Network:
    """Reads a network.

    Args:
        source: Name of a preset, or path of a YAML file with the fields of :class:`Network`; its key ``base``
            names the preset that supplies what is left out (``h100``).
        yaml_path: Where it was asked for, for messages.

    Raises:
        ConfigError: If there is none, or a value is wrong.
    """
    if source in PRESETS:
        return PRESETS[source]
    path = os.path.expanduser(source)
    if '/' not in source and not source.endswith(('.yaml', '.yml')) and not os.path.isfile(path):
        raise ConfigError(
            f'{yaml_path}: no network {reprlib.repr(source)}; there are {", ".join(PRESETS)}, or a YAML '
            f'file.{did_you_mean(source, PRESETS)}',
            yaml_path=yaml_path,
            source=source,
        )
    where = f'{yaml_path}: {source}'
    document = parse(read_file(path, where), where)
    data: object = document.data
    if not isinstance(data, dict) or not data:
        raise ConfigError(
            f'{where}: found {reprlib.repr(cast(Any, data))}, expected values such as '
            'inter_gbit_per_s: 200',
            yaml_path=yaml_path,
            source=source,
        )
    for key, first, second in document.duplicates:
        raise ConfigError(
            f'{where}:{second}: {key[-1]}: given twice; the first is in line {first}', source=source
        )
    values = dict(cast(dict[Any, Any], data))
    base = values.pop('base', 'h100')
    if base not in PRESETS:
        raise ConfigError(
            f'{where}: base: found {base!r}, expected one of {", ".join(PRESETS)}', source=source
        )
    return changed(PRESETS[base], values, where)


def changed(network: Network, values: Mapping[Any, Any], where: str) -> Network:
    """``network`` with other values, each checked.

    Raises:
        ConfigError: Naming the value that is wrong, after ``where``.
    """
    known = [field.name for field in dataclasses.fields(network)]
    for key in values:
        if key not in known:
            raise ConfigError(
                f'{where}: unknown key {key!r}; there are base, {", ".join(known)}.'
                f'{did_you_mean(str(key), known)}'
            )
    plain = {**dataclasses.asdict(network), **values}
    numbers = {
        key: float(value) if type(value) is int and key != 'gpus_per_node' else value
        for key, value in plain.items()
    }
    try:
        return adapter(Network).validate_json(json.dumps(numbers, default=str))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = str(first['loc'][0]) if first['loc'] else ''
        raise ConfigError(
            f'{where}: {key}: found {plain.get(key)!r}: {first["msg"].lower()}', yaml_path=key
        ) from None
