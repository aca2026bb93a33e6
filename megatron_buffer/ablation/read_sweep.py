"""A sweep file in, a checked :class:`~megatron_buffer.ablation.sweep.Sweep` out.

All problems are collected, each with its YAML path and line, and raised as one error before anything
runs; what arms say about the buffer goes through the config's own checks. Upstream has no counterpart.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_buffer.ablation import tiny
from megatron_buffer.ablation.launcher import TORCHRUN, launcher_problems, names_placeholder
from megatron_buffer.ablation.read_arms import ArmReader
from megatron_buffer.ablation.read_values import Values
from megatron_buffer.ablation.sweep import KINDS, Arm, Expectation, Sweep, Workload
from megatron_buffer.config import BufferConfig, load_config
from megatron_buffer.config_problems import found
from megatron_buffer.config_yaml import YamlPath, did_you_mean, parse, read_file
from megatron_buffer.errors import ConfigError, RegistryError

SCHEMA_VERSION = 1
KEYS = (
    'schema_version',
    'question',
    'base',
    'arms',
    'grid',
    'baseline',
    'workload',
    'seeds',
    'repeats',
    'time_limit_s',
    'env',
    'launcher',
    'max_jobs',
    'expect',
)
"""Keys of a sweep file."""
WORKLOAD_KEYS = ('script', 'flags', 'ranks', 'nodes', 'steps', 'warmup_steps', 'device', 'cwd')
DEVICES = ('auto', 'cpu', 'gpu')


def shipped_sweeps() -> dict[str, Path]:
    """The sweeps that come with the package, by name."""
    package = Path(__file__).resolve().parents[1]
    inside, beside = package / 'configs', package.parent / 'configs'
    folder = (inside if inside.is_dir() else beside) / 'ablations' / 'sweeps'
    return {path.stem: path for path in sorted(folder.glob('*.yaml'))}


def load_sweep(source: str) -> Sweep:
    """Reads a sweep file.

    Args:
        source: Name of a shipped sweep, or a path.

    Raises:
        ConfigError: With every problem of the file, or if there is none.
    """
    shipped = shipped_sweeps()
    if source in shipped:
        path = str(shipped[source])
    elif '/' in source or source.endswith(('.yaml', '.yml')) or os.path.isfile(source):
        path = os.path.expanduser(source)
    else:
        raise ConfigError(
            f'no sweep named {source!r} comes with the package; there are: '
            f'{", ".join(shipped) or "none, so this installation is incomplete"}.'
            f"{did_you_mean(source, shipped)} A path must contain a '/' or end in .yaml",
            source=source,
        )
    text = read_file(path, source)
    document = parse(text, source)
    values = Values(source, document.lines)
    for where, first, second in document.duplicates:
        values.add(where, f'given twice, on lines {first} and {second}; keep one', second)
    if not isinstance(document.data, Mapping):
        values.add((), f'found {found(document.data)}, expected a mapping with {", ".join(KEYS)}')
        values.raise_if_any()
    return _Reader(values, document.data, Path(path).absolute(), text).read()


class _Reader:
    """Reads one document; ``read`` is the order in which it is done."""

    def __init__(self, values: Values, data: Mapping[Any, Any], path: Path, text: str) -> None:
        self._values, self._path, self._text = values, path, text
        self._data = values.mapping((), data, KEYS)

    def read(self) -> Sweep:
        values, data = self._values, self._data
        self._check_version()
        base = values.text(('base',), data.get('base'), 'upstream') or 'upstream'
        base_config = self._base(base)
        workload = self._workload()
        seeds = self._seeds()
        repeats = values.integer(('repeats',), data.get('repeats'), 3)
        env = values.env(('env',), data.get('env'))
        arms = ArmReader(values, base_config, self._path.parent).read(
            data.get('arms'), data.get('grid')
        )
        baseline = self._baseline(arms)
        launcher, max_jobs = self._launcher(workload)
        self._check_placeholders(workload, seeds, arms, env)
        expect = self._expect(arms)
        time_limit_s = values.integer(('time_limit_s',), data.get('time_limit_s'), 1800)
        question = values.text(('question',), data.get('question'))
        values.raise_if_any()
        return Sweep(
            name=self._path.stem,
            source=values.source,
            text=self._text,
            question=' '.join(question.split()),
            base=base,
            base_config=base_config,
            arms=arms,
            baseline=baseline,
            workload=workload,
            seeds=seeds,
            repeats=repeats,
            time_limit_s=time_limit_s,
            env=env,
            launcher=launcher,
            max_jobs=max_jobs,
            expect=expect,
        )

    def _check_version(self) -> None:
        version = self._data.get('schema_version')
        line = f'schema_version: {SCHEMA_VERSION}'
        if version is None:
            self._values.add((), f'schema_version is missing; add the line: {line}')
        elif version != SCHEMA_VERSION or isinstance(version, bool):
            self._values.add(
                ('schema_version',),
                f'found {found(version)}, but this release of megatron-buffer reads {SCHEMA_VERSION} only',
            )

    def _base(self, base: str) -> BufferConfig:
        try:
            return load_config(beside(self._path.parent, base))
        except (ConfigError, RegistryError) as error:
            self._values.add(('base',), str(error))
            return BufferConfig()

    def _workload(self) -> Workload:
        values, path = self._values, ('workload',)
        said = values.mapping(path, self._data.get('workload'), WORKLOAD_KEYS)
        ranks = values.integer((*path, 'ranks'), said.get('ranks'), 2)
        nodes = values.integer((*path, 'nodes'), said.get('nodes'), 1)
        steps = values.integer((*path, 'steps'), said.get('steps'), 12)
        warmup_steps = values.integer((*path, 'warmup_steps'), said.get('warmup_steps'), 2, least=1)
        if ranks % nodes:
            values.add(
                (*path, 'nodes'), f'{ranks} ranks cannot be spread evenly over {nodes} nodes'
            )
        if steps < warmup_steps + 1:
            values.add(
                (*path, 'steps'),
                f'found {steps}, but no time is taken of the first {warmup_steps} (warmup_steps); expected '
                f'at least {warmup_steps + 1}',
            )
        device = values.one_of((*path, 'device'), said.get('device'), DEVICES)
        flags = values.flags((*path, 'flags'), said.get('flags'))
        script = values.text((*path, 'script'), said.get('script'))
        cwd = values.text((*path, 'cwd'), said.get('cwd'))
        folder = self._path.parent
        found_script = tiny.script() if not script else folder / os.path.expanduser(script)
        if found_script is None:
            values.add(
                path, 'this installation lacks the script of the default workload; give script'
            )
        elif not found_script.is_file():
            values.add((*path, 'script'), f'no such file (looked for {found_script})')
        if cwd and not (folder / os.path.expanduser(cwd)).is_dir():
            values.add((*path, 'cwd'), f'no such folder (looked for {folder / cwd})')
        defaults = tiny.flags(ranks) if not script else {}
        return Workload(
            script=(found_script or folder).absolute(),
            is_tiny=not script,
            flags={**defaults, 'train-iters': '{steps}', 'seed': '{seed}', **flags},
            ranks=ranks,
            nodes=nodes,
            steps=steps,
            warmup_steps=warmup_steps,
            device=device,
            cwd=(folder / os.path.expanduser(cwd or '.')).absolute() if cwd or script else None,
        )

    def _seeds(self) -> tuple[int, ...]:
        said = self._data.get('seeds')
        seeds = [1234] if said is None else said if isinstance(said, list) else [said]
        if not seeds:
            self._values.add(('seeds',), 'found an empty list, expected at least one integer')
        good: list[int] = []
        for index, seed in enumerate(seeds):
            path: YamlPath = ('seeds', index) if isinstance(said, list) else ('seeds',)
            value = self._values.integer(path, seed, 1234, least=0)
            if value in good:
                self._values.add(path, f'{value} is there twice; repeats runs a seed again')
            good.append(value)
        return tuple(good)

    def _baseline(self, arms: Mapping[str, Arm]) -> str:
        stock = [name for name, arm in arms.items() if arm.config is None]
        default = (stock or list(arms) or [''])[0]
        name = self._values.text(('baseline',), self._data.get('baseline'), default)
        if arms:
            self._check_arm(('baseline',), name, arms)
            for arm in arms.values():
                if arm.against:
                    self._check_arm(('arms', arm.name, 'against'), arm.against, arms)
        return name

    def _check_arm(self, path: YamlPath, name: str, arms: Mapping[str, Arm]) -> bool:
        if name in arms:
            return True
        self._values.add(
            path, f'there is no arm {name!r}.{did_you_mean(name, arms)} Arms: {", ".join(arms)}'
        )
        return False

    def _launcher(self, workload: Workload) -> tuple[tuple[str, ...], int | None]:
        values, said = self._values, self._data.get('launcher')
        jobs = self._data.get('max_jobs')
        if said is None:
            if workload.nodes > 1:
                values.add(
                    ('workload', 'nodes'),
                    'the default launcher starts ranks on this machine only; give a launcher, such as: srun '
                    '--nodes={nodes} --ntasks-per-node=1 torchrun --nnodes={nodes} '
                    '--nproc-per-node={ranks_per_node} --rdzv-backend=c10d --rdzv-endpoint=${HEAD}:{port} '
                    '--rdzv-id={run} {command}',
                )
            if jobs is not None:
                values.add(
                    ('max_jobs',),
                    'only for a launcher of your own; the default one counts CPUs and GPUs',
                )
            return TORCHRUN, None
        words: list[str] = []
        if isinstance(said, str):
            try:
                words = shlex.split(said)
            except ValueError as error:
                values.add(('launcher',), f'cannot be split into words: {error}')
                return TORCHRUN, None
        elif isinstance(said, list) and all(isinstance(word, str) for word in said):
            words = said
        if not words:
            values.add(
                ('launcher',),
                f'found {found(said)}, expected a command, as text or a list of words, with {{command}} in it',
            )
            return TORCHRUN, None
        if workload.device == 'auto':
            values.add(
                ('workload', 'device'),
                'a launcher of your own may start runs on other machines, so say whether these use the cpu or '
                'the gpu',
            )
        for text in launcher_problems(words):
            values.add(('launcher',), text)
        return tuple(words), values.integer(('max_jobs',), jobs, 1)

    def _check_placeholders(
        self,
        workload: Workload,
        seeds: tuple[int, ...],
        arms: Mapping[str, Arm],
        env: Mapping[str, str],
    ) -> None:
        """A seed or a number of steps that the script never hears of would be a lie."""
        for name, values_of, text in (
            ('seed', seeds if len(seeds) > 1 else (), f'{len(seeds)} seeds'),
            ('steps', (workload.steps,), f'{workload.steps} steps'),
        ):
            for arm in arms.values() if values_of else ():
                said = [*({**workload.flags, **arm.flags}).values(), *({**env, **arm.env}).values()]
                if not any(names_placeholder(value, name) for value in said):
                    where = ('seeds',) if name == 'seed' else ('workload', 'steps')
                    self._values.add(
                        where,
                        f'{text}, but no flag or environment variable of arm {arm.name!r} holds {{{name}}}, '
                        'so the script would not know',
                    )
                    break

    def _expect(self, arms: Mapping[str, Arm]) -> dict[str, tuple[Expectation, ...]]:
        result: dict[str, tuple[Expectation, ...]] = {}
        for name, said in self._values.mapping(('expect',), self._data.get('expect')).items():
            path: YamlPath = ('expect', name)
            if arms and not self._check_arm(path, name, arms):
                continue
            is_list = isinstance(said, list)
            items = said if is_list else [said]
            read = [
                self._expectation((*path, index) if is_list else path, item, arms)
                for index, item in enumerate(items)
            ]
            result[name] = tuple(one for one in read if one is not None)
        return result

    def _expectation(
        self, path: YamlPath, said: Any, arms: Mapping[str, Arm]
    ) -> Expectation | None:
        values = self._values
        kind, options = said, None
        if isinstance(said, Mapping) and len(said) == 1:
            kind, options = next(iter(said.items()))
        if not isinstance(kind, str) or kind not in KINDS:
            hint = did_you_mean(kind, KINDS) if isinstance(kind, str) else ''
            values.add(
                path,
                f'found {found(kind)}, expected one of {", ".join(KINDS)}, or a mapping of one of them and '
                f'its options.{hint}',
            )
            return None
        default = KINDS[kind].tolerance
        where: YamlPath = (*path, kind)
        if kind == 'fails':
            return Expectation(kind=kind, error=values.text(where, options))
        if isinstance(options, int | float | str) and not isinstance(options, bool):
            options = {'tolerance': options}
        known = ('than', *(('tolerance',) if default is not None else ()))
        read = values.mapping(where, options, known, f'option of {kind!r}')
        than = values.text((*where, 'than'), read.get('than'))
        if than and arms:
            self._check_arm((*where, 'than'), than, arms)
        if read.get('tolerance') is not None:
            default = values.number((*where, 'tolerance'), read['tolerance'])
        return Expectation(kind=kind, than=than, tolerance=default)


def beside(folder: Path, name: str) -> str:
    """A config's path relative to the sweep file; a shipped name as it is."""
    name = os.path.expanduser(name)
    is_path = '/' in name or name.endswith(('.yaml', '.yml'))
    inside = folder / name
    return str(inside) if is_path and inside.is_file() else name
