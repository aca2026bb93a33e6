"""The patching engine on tiny packages: every kind of holder, exact revert, refusals that change nothing."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
import textwrap
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_buffer.errors import PatchError
from megatron_buffer.patching import engine
from megatron_buffer.patching.engine import Transaction
from megatron_buffer.patching.holders import Edit, Slot, find_holders
from megatron_buffer.patching.targets import Target

UPSTREAM = {
    'fakeup/__init__.py': """
        from fakeup.engine import Engine, Tool
        from fakeup.finalize import finalize
    """,
    'fakeup/engine.py': """
        class Base:
            def __init__(self):
                self.made_by = [type(self).__name__]

        class Engine(Base):
            def __init__(self):
                super().__init__()
                self.made_by.append('stock')

            def power(self):
                return 1

        class Tool:
            @staticmethod
            def plain(x):
                return ('stock', x)

            @classmethod
            def known(cls, x):
                return (cls.__name__, 'stock', x)

            def method(self):
                return 'stock'
    """,
    'fakeup/finalize.py': """
        def finalize(model=None):
            return 'stock'

        def parse(argv):
            return list(argv)
    """,
}
OURS = """
    import functools
    import fakeup.engine

    class Engine(fakeup.engine.Engine):
        def __init__(self):
            super().__init__()
            self.made_by.append('ours')

    def plain(x):
        return ('ours', x)

    def known(cls, x):
        return (cls.__name__, 'ours', x)

    def method(self):
        return 'ours'

    def finalize(model=None):
        return 'ours'

    def wrap_parse(original):
        @functools.wraps(original)
        def parse(argv):
            return ['ours', *original(argv)]

        return parse
"""
USER = """
    import collections
    import dataclasses
    import functools
    import fakeup
    from fakeup import Engine as Renamed, Tool, finalize
    from fakeup.finalize import parse

    Point = collections.namedtuple('Point', 'kind other')
    TUPLE = (1, Renamed, 'x')
    NAMED = Point(Renamed, 2)
    NESTED = [('a', Renamed), {'deep': Renamed}]
    TABLE = {'engine': Renamed, 'n': 1}
    BY_CLASS = {int: 'int', Renamed: 'engine', str: 'str'}
    MEMBERS = {Renamed, int}
    FROZEN = frozenset({Renamed, int})
    PARTIAL = functools.partial(isinstance, object())
    PARTIAL_ARGS = functools.partial(issubclass, Renamed, object)
    PARTIAL_KEYWORDS = functools.partial(dict, kind=Renamed)
    PARTIAL_FUNC = functools.partial(finalize, None)

    def keyword(*, DP=Renamed):
        return DP

    def default(x, kind=Renamed, also=(Renamed,)):
        return kind, also

    def make_closure(kind):
        def inner():
            return kind

        return inner

    CLOSURE = make_closure(Renamed)

    def decorate(function):
        @functools.wraps(function)
        def wrapper(*args):
            return function(*args)

        return wrapper

    @decorate
    def decorated(x=Renamed):
        return x

    class Trainer:
        engine_class = Renamed
        choices = [Renamed]
        final = staticmethod(finalize)

        def build(self, kind=Renamed, *, other=Renamed):
            return kind, other

        @property
        def kind(self, _kind=Renamed):
            return _kind

    @dataclasses.dataclass
    class Options:
        kind: type = Renamed

    class Mine(Renamed):
        def power(self):
            return super().power() + 1
"""


def _target(module: str, qualname: str, replacement: str = '', wrapper: str = '') -> Target:
    ours = 'megatron_buffer._fake'
    return Target(
        group='core',
        module=module,
        qualname=qualname,
        replacement=f'{ours}:{replacement}' if replacement else '',
        wrapper=f'{ours}:{wrapper}' if wrapper else '',
    )


ENGINE = _target('fakeup.engine', 'Engine', 'Engine')
FINALIZE = _target('fakeup.finalize', 'finalize', 'finalize')
TARGETS = (
    ENGINE,
    FINALIZE,
    _target('fakeup.engine', 'Tool.plain', 'plain'),
    _target('fakeup.engine', 'Tool.known', 'known'),
    _target('fakeup.engine', 'Tool.method', 'method'),
    _target('fakeup.finalize', 'parse', wrapper='wrap_parse'),
)
type Write = Callable[[str, str], Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Writes modules into a folder on sys.path, the fake upstream package to begin with."""
    before = set(sys.modules)

    def write_file(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(textwrap.dedent(text))
        importlib.invalidate_caches()
        return path

    for name, text in UPSTREAM.items():
        write_file(name, text)
    ours = write_file('ours/_fake.py', OURS)
    monkeypatch.syspath_prepend(str(tmp_path))

    class OurFinder:
        """Makes megatron_buffer._fake importable."""

        @staticmethod
        def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
            if name == 'megatron_buffer._fake':
                return importlib.util.spec_from_file_location(name, ours)
            return None

    monkeypatch.setattr(sys, 'meta_path', [OurFinder, *sys.meta_path])
    yield write_file
    for name in set(sys.modules) - before:
        if name.partition('.')[0] in ('fakeup', 'user', 'late') or name == 'megatron_buffer._fake':
            del sys.modules[name]
    sys.modules.pop('megatron_buffer._fake', None)


def _load(write: Write, name: str = 'user', text: str = USER) -> Any:
    write(f'{name}.py', text)
    return importlib.import_module(name)


def _commit(targets: tuple[Target, ...] = TARGETS) -> Transaction:
    transaction = Transaction(targets)
    transaction.prepare()
    transaction.commit()
    return transaction


def _snapshot(*modules: types.ModuleType) -> dict[str, Any]:
    """Raw values of everything in some modules, by place; compare with ``_changed``."""
    found: dict[str, Any] = {}

    def add(where: str, value: Any, level: int = 0) -> None:
        found[where] = value
        if level > 3:
            return
        if isinstance(value, types.FunctionType):
            add(f'{where}.defaults', value.__defaults__, level + 1)
            for name, default in (value.__kwdefaults__ or {}).items():
                add(f'{where}({name})', default, level + 1)
            for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
                add(f'{where}<{name}>', cell.cell_contents, level + 1)
        elif isinstance(value, type) and value.__module__ in [m.__name__ for m in modules]:
            add(f'{where} bases', value.__bases__, 9)
            for name, member in vars(value).items():
                add(f'{where}.{name}', member, level + 1)
        elif isinstance(value, list | tuple):
            for i, item in enumerate(value):
                add(f'{where}[{i}]', item, level + 1)
        elif isinstance(value, dict):
            for i, (key, item) in enumerate(value.items()):
                add(f'{where} key {i}', key, 9)
                add(f'{where}[{key}]', item, level + 1)
        elif isinstance(value, set | frozenset):
            add(f'{where} members', frozenset(value), 9)
        elif hasattr(value, 'func') and hasattr(value, 'keywords'):
            add(f'{where} func', value.func, 9)
            add(f'{where} args', value.args, level + 1)
            for name, item in value.keywords.items():
                add(f'{where}({name}=)', item, 9)

    for module in modules:
        for name, value in vars(module).items():
            if name not in ('__builtins__', '__annotations__'):
                add(f'{module.__name__}:{name}', value)
    return found


def _changed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    made_here = (' members', ' bases')  # equal is enough for what the snapshot made itself
    return [
        where
        for where in {*before, *after}
        if before.get(where, before) is not after.get(where, after)
        and not (where.endswith(made_here) and before.get(where) == after.get(where))
    ]


def _fake() -> Any:
    return importlib.import_module('megatron_buffer._fake')


def test_every_kind_of_holder_is_exchanged_and_restored(write: Write) -> None:
    user = _load(write)
    fakeup = importlib.import_module('fakeup')
    modules = [sys.modules[n] for n in ('fakeup', 'fakeup.engine', 'fakeup.finalize', 'user')]
    stock, stock_final = user.Renamed, user.finalize
    named, frozen, partial = user.NAMED, user.FROZEN, user.PARTIAL_ARGS
    before = _snapshot(*modules)
    transaction = _commit()
    ours, final = _fake().Engine, _fake().finalize

    assert fakeup.Engine is sys.modules['fakeup.engine'].Engine is user.Renamed is ours
    assert fakeup.finalize is sys.modules['fakeup.finalize'].finalize is user.finalize is final
    assert (1, ours, 'x') == user.TUPLE
    assert (ours, 2) == user.NAMED
    assert type(user.NAMED) is user.Point
    assert user.NESTED[0] == ('a', ours)
    assert user.NESTED[1]['deep'] is ours
    assert user.TABLE['engine'] is ours
    assert list(user.BY_CLASS.items()) == [(int, 'int'), (ours, 'engine'), (str, 'str')]
    assert user.MEMBERS == user.FROZEN == {ours, int}
    assert user.PARTIAL_ARGS is partial
    assert partial() is True
    assert partial.args[0] is ours
    assert user.PARTIAL_KEYWORDS()['kind'] is ours
    assert user.PARTIAL_FUNC() == 'ours'
    assert user.keyword() is ours
    assert user.default(0) == (ours, (ours,))
    assert user.CLOSURE() is ours
    assert user.decorated() is ours
    assert user.Trainer.engine_class is user.Trainer.choices[0] is ours
    assert isinstance(vars(user.Trainer)['final'], staticmethod)
    assert user.Trainer.final() == 'ours'
    assert user.Trainer().build() == (ours, ours)
    assert user.Trainer().kind is ours
    assert user.Options().kind is user.Options.__dataclass_fields__['kind'].default is ours
    assert user.Mine.__bases__ == (ours,)
    assert user.Mine().made_by == ['Mine', 'stock', 'ours']
    assert user.Mine().power() == 2
    assert user.Renamed().made_by == ['Engine', 'stock', 'ours']
    assert ours.__bases__ == (stock,)
    assert not transaction.unreachable or all('test_' in text for text in transaction.unreachable)

    transaction.revert()
    assert _changed(before, _snapshot(*modules)) == []
    assert user.Renamed is fakeup.Engine is stock
    assert user.finalize is stock_final
    assert user.NAMED is named
    assert user.FROZEN is frozen
    assert user.Renamed().made_by == ['Engine', 'stock']
    assert user.Mine().made_by == ['Mine', 'stock']


def test_static_and_class_methods_stay_what_they_are(write: Write) -> None:
    write('user.py', 'from fakeup import Tool\nplain = Tool.plain\nknown = Tool.known\n')
    user = importlib.import_module('user')
    tool = user.Tool
    before = dict(vars(tool))
    transaction = _commit()
    assert isinstance(vars(tool)['plain'], staticmethod)
    assert isinstance(vars(tool)['known'], classmethod)
    assert tool.plain(1) == tool().plain(1) == user.plain(1) == ('ours', 1)
    assert tool.known(1) == tool().known(1) == user.known(1) == ('Tool', 'ours', 1)
    assert tool().method() == 'ours'
    transaction.revert()
    assert {n for n in before if vars(tool)[n] is not before[n]} == set()
    assert user.plain(1) == ('stock', 1)
    assert user.known(1) == ('Tool', 'stock', 1)


def test_modules_imported_later_are_restored_too(write: Write) -> None:
    late_user = """
        import megatron_buffer
        from fakeup import Engine, finalize as final

        def build(*, kind=Engine):
            return kind

        class Late(Engine):
            pass
    """
    late_direct = """
        from megatron_buffer._fake import Engine
        import fakeup

        class Meant(Engine):
            pass

        OTHER = fakeup.Engine
    """
    stock = importlib.import_module('fakeup').Engine
    transaction = _commit()
    ours = _fake().Engine
    late = _load(write, 'late', late_user)
    direct = _load(write, 'late_direct', late_direct)
    assert late.Engine is late.build() is ours
    assert late.Late.__bases__ == (ours,)
    transaction.revert()
    assert late.Engine is late.build() is stock
    assert late.final() == 'stock'
    assert late.Late.__bases__ == (stock,)
    assert direct.Engine is ours, 'imported from us by name: meant to stay'
    assert direct.Meant.__bases__ == (ours,)
    assert direct.OTHER is stock
    del sys.modules['late_direct']


def test_deliberate_holders_of_ours_stay(write: Write) -> None:
    importlib.import_module('fakeup')
    user = _load(write, 'user', 'import megatron_buffer._fake as f\nCHOICES = [f.Engine]\n')
    transaction = _commit()
    transaction.revert()
    assert [_fake().Engine] == user.CHOICES


def test_living_objects_keep_a_subclass_as_it_is(write: Write) -> None:
    user = _load(write)
    keep = user.Mine()
    stock = user.Renamed
    transaction = _commit((ENGINE,))
    assert user.Mine.__bases__ == (stock,)
    assert [t for t in transaction.unreachable if t.startswith('user:Mine (bases): 1 living')]
    del keep
    transaction.revert()
    assert user.Mine.__bases__ == (stock,)


def test_unreachable_holders_are_named(write: Write) -> None:
    text = """
        import dataclasses
        from fakeup import Engine

        @dataclasses.dataclass(frozen=True)
        class Frozen:
            choices: tuple

        FROZEN = Frozen((Engine, int))

        def annotated(x: Engine) -> Engine:
            return x

        def run(action):
            local = Engine
            action()
            return local
    """
    user = _load(write, 'user', text)
    built = user.Engine()
    transaction = Transaction([ENGINE])
    transaction.prepare()
    user.run(transaction.commit)
    stock = transaction.resolved[0].original
    assert user.FROZEN.choices[0] is stock
    told = '\n'.join(transaction.unreachable)
    assert 'a tuple in a user.Frozen object' in told
    assert "local variable 'local' of run" in told
    assert '1 living object(s) of stock fakeup.engine.Engine' in told
    assert 'annotated' not in told
    assert type(built) is stock
    transaction.revert()


@pytest.mark.parametrize('how', ['replaced', 'wrapped', 'method', 'ours', 'missing', 'reloaded'])
def test_a_conflict_leaves_nothing_changed(write: Write, how: str) -> None:
    user = _load(write)
    module = sys.modules['fakeup.finalize']
    targets = TARGETS
    if how == 'replaced':
        module.finalize = lambda model=None: 'theirs'
        expected = r'fakeup.finalize:finalize is .*lambda.*somebody else has replaced it'
    elif how == 'wrapped':
        stock_finalize = module.finalize
        module.finalize = lambda model=None: stock_finalize(model)
        expected = r'somebody else has replaced it'
    elif how == 'method':
        sys.modules['fakeup.engine'].Tool.method = lambda self: 'theirs'
        expected = r'Tool.method is .*somebody else'
    elif how == 'ours':
        module.finalize = _fake().finalize
        expected = r'already ours'
    elif how == 'missing':
        targets = (*TARGETS, _target('fakeup.engine', 'Gone', 'Engine'))
        expected = r'fakeup.engine:Gone is not there'
    else:
        _fake()
        importlib.reload(sys.modules['fakeup.engine'])
        expected = r'does not subclass the class that is loaded'
    modules = [sys.modules[n] for n in ('fakeup', 'fakeup.engine', 'fakeup.finalize', 'user')]
    before = _snapshot(*modules)
    with pytest.raises(PatchError, match=expected):
        _commit(targets)
    assert _changed(before, _snapshot(*modules)) == []
    assert user.keyword() is user.Renamed


def test_a_failure_in_the_middle_is_rolled_back(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = _load(write)
    modules = [sys.modules[n] for n in ('fakeup', 'fakeup.engine', 'fakeup.finalize', 'user')]
    before = _snapshot(*modules)
    seen: list[bool] = []

    def refuse(_: Any) -> None:
        seen.append(user.Renamed is _fake().Engine)
        raise RuntimeError('this place is on fire')

    def with_a_bad_one(pairs: Any) -> list[Edit]:
        return [*find_holders(pairs), Edit(Slot('user:bad', user, lambda: None, refuse), None, 1)]

    monkeypatch.setattr(engine, 'find_holders', with_a_bad_one)
    transaction = Transaction(TARGETS)
    transaction.prepare()
    with pytest.raises(
        PatchError, match='nothing was changed: RuntimeError: this place is on fire'
    ):
        transaction.commit()
    assert seen == [True], 'the failure came after others had been changed'
    assert transaction.edits == []
    assert _changed(before, _snapshot(*modules)) == []


def test_revert_refuses_when_a_defining_name_was_changed_since(write: Write) -> None:
    user = _load(write)
    module = sys.modules['fakeup.finalize']
    transaction = _commit()
    ours = module.finalize
    module.finalize = user.keyword
    with pytest.raises(PatchError, match=r'fakeup.finalize:finalize is user.keyword .*user.py'):
        transaction.revert()
    assert user.Renamed is _fake().Engine, 'nothing is restored then'
    module.finalize = ours
    transaction.revert()
    assert user.finalize() == 'stock'


def test_holders_that_changed_since_are_left_alone(write: Write) -> None:
    user = _load(write)
    stock = user.Renamed
    transaction = _commit()
    user.TABLE['engine'] = int
    user.keyword.__kwdefaults__ = {'DP': str}
    user.NESTED.append(user.Renamed)
    user.MEMBERS.add(str)
    transaction.revert()
    assert user.TABLE['engine'] is int
    assert user.keyword() is str
    assert user.NESTED[-1] is stock
    assert {stock, int, str} == user.MEMBERS


@pytest.mark.long
def test_wrapping_factories(write: Write) -> None:
    user = _load(write)
    module = sys.modules['fakeup.finalize']
    stock = module.parse
    module.parse = lambda argv: ['theirs', *stock(argv)]
    theirs = module.parse
    transaction = _commit((TARGETS[-1],))
    assert module.parse(['a']) == ['ours', 'theirs', 'a']
    transaction.revert()
    assert module.parse is theirs
    module.parse = stock
    transaction = _commit((TARGETS[-1],))
    assert (
        user.parse(['a']) == module.parse(['a']) == ['ours', 'a']
    ), 'the wrapper keeps the original'
    transaction.revert()
    assert user.parse is module.parse is stock


def test_the_sweep_leaves_strange_modules_alone(write: Write) -> None:
    class Trap(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f'{name} was looked up')

        def __setattr__(self, name: str, value: Any) -> None:
            raise AssertionError(f'{name} was set')

    class Proxy:
        @property
        def __class__(self) -> Any:
            raise AssertionError('a lazy proxy was asked for its class')

    user = _load(write)
    trap = Trap('user_trap')
    vars(trap)['held'] = user.Renamed
    user.proxy = Proxy()
    strange: dict[str, Any] = {'user_trap': trap, 'user_number': 7, 'user_none': None}
    sys.modules.update(strange)
    try:
        transaction = _commit()
        assert vars(trap)['held'] is _fake().Engine
        transaction.revert()
        assert vars(trap)['held'] is user.Renamed
    finally:
        for name in strange:
            del sys.modules[name]


@pytest.mark.long
def test_installing_again_after_a_revert(write: Write) -> None:
    user = _load(write)
    stock = user.Renamed
    for _ in range(3):
        transaction = _commit()
        assert user.Renamed is _fake().Engine
        transaction.revert()
        assert user.Renamed is user.keyword() is stock


def test_own_modules_keep_the_originals(write: Write, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    _load(write)
    stock = sys.modules['fakeup.engine'].Engine
    _fake().KEPT = stock
    transaction = _commit()
    assert _fake().KEPT is stock
    assert not [text for text in transaction.unreachable if 'KEPT' in text or '_fake' in text]
    transaction.revert()
    assert not caplog.records
