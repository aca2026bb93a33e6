"""Imports go one way, the light modules stay light, and who may write into other modules is known.

The modules are read, not run, except for one subprocess per claim about what an import loads.
"""

from __future__ import annotations

import ast
import fnmatch
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, TypeGuard

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = 'megatron_buffer'

# From the bottom up. A module imports from lower layers only, or from its own pattern (a family of
# modules that share one responsibility).
LAYERS: tuple[tuple[str, ...], ...] = (
    ('liveness', 'printing', 'collector'),
    ('errors',),
    ('config*',),
    ('profile', 'record_request', 'observe.request'),
    ('strategies*',),
    ('layout*', 'bucket_size'),
    ('runtime', 'hook_identity'),
    (
        'param_layout',
        'collectives*',
        'agreement',
        'grad_values',
        'grad_writes',
        'window',
        'late_grads',
        'prediction',
        'gather_guard',
        'shard_copies',
    ),
    ('buffer', 'recording*', 'gather_chain', 'checkpoint*', 'param_checks', 'embedding_agreement'),
    ('bucket_groups',),
    ('optimizer', 'wrap_checks', 'chunk_window', 'hooks'),
    ('observe*',),
    ('ddp', 'finalize*'),
    ('cpu*',),
    ('patching*', 'planner*'),
    ('reference*',),
    ('ablation*',),
    ('launch*',),
    ('cli*',),
    ('__main__',),
    ('testing*',),
)
# Importable without torch and Megatron.
LIGHT = (
    '',
    'collector',
    'liveness',
    'errors',
    'config*',
    'cli*',
    'ablation*',
    '__main__',
    'bucket_size',
    'profile',
    'record_request',
    'observe',
    'observe.request',
    'observe.trace_*',
    'printing',
    'planner',
    'planner.architecture',
    'planner.averages',
    'planner.command',
    'planner.files',
    'planner.flags',
    'planner.fold',
    'planner.hf',
    'planner.job',
    'planner.ledger',
    'planner.megatron_args',
    'planner.plan_command',
    'planner.request',
    'planner.simulate_command',
    'planner.simulation',
    'planner.timeline',
    'planner.trace',
    'planner.tune_command',
    'planner.units',
    'reference*',
)

# `setattr` on something that is no module: an argparse namespace, what a rank left behind.
SETATTR_ON_OBJECTS = {
    ('launch', 'namespace'),
    ('observe.watch', 'group'),
    ('testing.harness', 'outcome'),
    ('testing.tiny_model', 'spec.submodules'),
}
# Writes into modules: CPU mode, patching, the names that a constructor sees for its own duration, wrappers
# around stock that only look (where somebody has asked to observe it), and the plugin for upstream's tests,
# which has its process to itself.
WRITERS = (
    'patching*',
    'cpu*',
    'ddp',
    'observe.seams',
    'testing.upstream_plugin',
    'testing.upstream_standins',
)
# Process-wide choices, put back as they were found: upstream's collective, multiprocessing's fork server.
RESTORED = {
    ('collectives', '_pgb.dist_reduce_scatter_func'),
    ('testing.harness', 'multiprocessing.forkserver.connect_to_new_process'),
}


class Import(NamedTuple):
    """One import statement, resolved."""

    target: str
    line: int
    at_module_level: bool


def name_of(path: Path) -> str:
    """Module name without the package: 'strategies.order', '' for the package itself."""
    parts = path.relative_to(ROOT / PACKAGE).with_suffix('').parts
    return '.'.join(part for part in parts if part != '__init__')


MODULES = {name_of(path): path for path in sorted((ROOT / PACKAGE).rglob('*.py'))}


def tree_of(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text(), filename=str(MODULES[module]))


def is_type_checking(test: ast.expr) -> bool:
    name = test.attr if isinstance(test, ast.Attribute) else getattr(test, 'id', '')
    return name == 'TYPE_CHECKING'


def live_nodes(node: ast.AST, in_function: bool = False) -> Iterator[tuple[ast.AST, bool]]:
    """All nodes that can run, each with whether it is inside a function."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and is_type_checking(child.test):
            for other in child.orelse:
                yield other, in_function
                yield from live_nodes(other, in_function)
            continue
        inside = in_function or isinstance(
            child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
        )
        yield child, in_function
        yield from live_nodes(child, inside)


def is_import_module(node: ast.AST) -> TypeGuard[ast.Call]:
    return isinstance(node, ast.Call) and ast.unparse(node.func).endswith('import_module')


def absolute(module: str, node: ast.ImportFrom) -> str:
    """The module that a from-import names, relative ones resolved."""
    if not node.level:
        return node.module or ''
    is_package = MODULES[module].name == '__init__.py'
    parts = [PACKAGE, *filter(None, module.split('.'))]
    base = parts[: len(parts) - node.level + is_package]
    return '.'.join([*base, *filter(None, [node.module])])


def imports_of(module: str) -> Iterator[Import]:
    """Everything that a module imports: statements, and import_module with a literal name."""
    for node, in_function in live_nodes(tree_of(module)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, not in_function)
        elif isinstance(node, ast.ImportFrom):
            base = absolute(module, node)
            for alias in node.names:
                full = f'{base}.{alias.name}'
                is_module = full.removeprefix(f'{PACKAGE}.') in MODULES
                yield Import(full if is_module else base, node.lineno, not in_function)
        elif is_import_module(node) and node.args and isinstance(node.args[0], ast.Constant):
            yield Import(str(node.args[0].value), node.lineno, not in_function)


def own_imports(module: str) -> Iterator[tuple[str, Import]]:
    """Imports from within the package, without the package itself (its version, lazy exports)."""
    for found in imports_of(module):
        if found.target.startswith(f'{PACKAGE}.'):
            yield found.target.removeprefix(f'{PACKAGE}.'), found


def place_of(module: str) -> tuple[int, str]:
    """Layer and pattern of a module."""
    for layer, patterns in enumerate(LAYERS):
        for pattern in patterns:
            if fnmatch.fnmatchcase(module, pattern):
                return layer, pattern
    raise AssertionError(
        f'{PACKAGE}.{module} has no place in the one-way order of imports: give it one in LAYERS of '
        f'{Path(__file__).name}'
    )


def matches(module: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(module, pattern) for pattern in patterns)


ALL = [pytest.param(module, id=module or PACKAGE) for module in MODULES]


@pytest.mark.parametrize('module', ALL)
def test_imports_go_one_way(module: str) -> None:
    if not module:
        at_once = [found for _, found in own_imports(module) if found.at_module_level]
        assert not at_once, f'{PACKAGE}/__init__.py exports lazily, but imports {at_once}'
        return
    layer, pattern = place_of(module)
    for target, found in own_imports(module):
        their_layer, their_pattern = place_of(target)
        assert (
            their_layer < layer or their_pattern == pattern
        ), f'{MODULES[module].relative_to(ROOT)}:{found.line} imports {target}, which is not below it'


def test_no_module_imports_itself_through_others() -> None:
    """Within a family too; imports inside functions are allowed to look back."""
    graph = {
        module: {target for target, found in own_imports(module) if found.at_module_level}
        for module in MODULES
    }
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, f'import cycle: {" -> ".join([*path, module])}'
        if module not in done:
            for target in sorted(graph.get(module, ())):
                visit(target, (*path, module))
            done.add(module)

    for module in MODULES:
        visit(module, ())


def test_imported_modules_exist() -> None:
    """A misspelt module would have no place, but one imported lazily is not noticed until it is used."""
    for module in MODULES:
        for target, found in own_imports(module):
            assert target in MODULES, f'{MODULES[module]}:{found.line} imports {target}'


@pytest.mark.parametrize('module', [param for param in ALL if matches(str(param.values[0]), LIGHT)])
def test_light_modules_import_neither_torch_nor_megatron(module: str) -> None:
    heavy = [
        f'line {found.line}: {found.target}'
        for found in imports_of(module)
        if found.at_module_level and found.target.partition('.')[0] in ('torch', 'megatron')
    ]
    assert not heavy, f'{MODULES[module].relative_to(ROOT)} imports {heavy}'


@pytest.mark.parametrize(
    'statements',
    [
        f'import {PACKAGE}; {PACKAGE}.load_config; {PACKAGE}.load_config("upstream")',
        f'import {PACKAGE}; {PACKAGE}.dump_config({PACKAGE}.load_config(None))',
        f'import {PACKAGE}.errors, {PACKAGE}.cli, {PACKAGE}.bucket_size',
    ],
)
def test_light_uses_load_neither_torch_nor_megatron(statements: str) -> None:
    code = f'''
import sys
{statements}
print(sorted(name for name in sys.modules if name.partition('.')[0] in ('torch', 'megatron')))
'''
    done = subprocess.run(
        [sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == '[]'


# ------------------------------------------------------------------ who writes into other modules


def root_of(node: ast.expr) -> str:
    """The name that an expression such as `a.b[0].c` starts from, looking through vars()."""
    while True:
        if isinstance(node, ast.Attribute | ast.Subscript):
            node = node.value
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == 'vars' and node.args:
            node = node.args[0]
        else:
            return getattr(node, 'id', '')


def imported_names(module: str) -> set[str]:
    """Names bound to what was imported from outside the standard library: modules, for the most part."""
    names: set[str] = set()
    for node, _ in live_nodes(tree_of(module)):
        if isinstance(node, ast.Import):
            names |= {
                alias.asname or alias.name.partition('.')[0]
                for alias in node.names
                if alias.name.partition('.')[0] not in sys.stdlib_module_names
            }
        elif isinstance(node, ast.ImportFrom):
            if absolute(module, node).partition('.')[0] not in sys.stdlib_module_names:
                names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign) and is_import_module(node.value):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


def writes_of(module: str) -> Iterator[tuple[int, ast.expr]]:
    """Targets of assignments and deletions other than plain names."""
    for node, _ in live_nodes(tree_of(module)):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign | ast.Delete):
            targets = node.targets
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        for target in targets:
            for leaf in ast.walk(target):
                if isinstance(leaf, ast.Attribute | ast.Subscript):
                    yield leaf.lineno, leaf
                    break


@pytest.mark.parametrize('module', [p for p in ALL if not matches(str(p.values[0]), WRITERS)])
def test_only_patching_writes_into_modules(module: str) -> None:
    """CPU mode and DDP's constructor are the documented exceptions."""
    where = MODULES[module].relative_to(ROOT)
    for node, _ in live_nodes(tree_of(module)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).split('.')[-1] in (
            'setattr',
            'delattr',
            '__setattr__',
        ):
            target = ast.unparse(node.args[0]) if node.args else ''
            assert (module, target) in SETATTR_ON_OBJECTS, (
                f'{where}:{node.lineno} sets an attribute of {target}; only patching writes into modules '
                f'(an object that is no module goes into SETATTR_ON_OBJECTS of {Path(__file__).name})'
            )
    imported = imported_names(module)
    for line, target in writes_of(module):
        if root_of(target) in imported and (module, ast.unparse(target)) not in RESTORED:
            raise AssertionError(f'{where}:{line} writes to {ast.unparse(target)}')


def test_the_exceptions_are_still_needed() -> None:
    """An exception that nothing uses any more would hide the next one."""
    setattrs = {
        (module, ast.unparse(node.args[0]))
        for module in MODULES
        for node, _ in live_nodes(tree_of(module))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == 'setattr'
    }
    written = {
        (module, ast.unparse(target)) for module in MODULES for _, target in writes_of(module)
    }
    assert setattrs >= SETATTR_ON_OBJECTS
    assert written >= RESTORED
