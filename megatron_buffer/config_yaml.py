"""A YAML file as plain data plus the line of every key, with each fault said in one sentence.

Used by :mod:`megatron_buffer.config`; knows nothing of what a config means.
"""

import difflib
import os
import re
import reprlib
from collections.abc import Hashable, Iterable, Mapping
from typing import Any, NamedTuple, cast

import yaml

from megatron_buffer.errors import ConfigError

YamlPath = tuple[Hashable, ...]
"""Where a value is: the keys (and list positions) that lead to it."""

_MAX_FILE_BYTES = 1 << 20
_MERGE_TAG = 'tag:yaml.org,2002:merge'
_INT_TAG = 'tag:yaml.org,2002:int'
_MISREAD_INT = re.compile(r'[-+]?(0[0-9_]+|[0-9_]+(:[0-9_]+)+)')


class Document(NamedTuple):
    """What a YAML file says.

    Attributes:
        data: Its value, of plain Python types.
        lines: Line (from 1) of each key and list item.
        duplicates: Every key given twice in one mapping, with the lines of both.
    """

    data: Any
    lines: Mapping[YamlPath, int]
    duplicates: list[tuple[YamlPath, int, int]]


def dotted(path: YamlPath) -> str:
    """``('padding', 'high_busbw')`` as ``padding.high_busbw``; a position in a list as ``[2]``."""
    text = ''
    for key in path:
        if isinstance(key, int) and not isinstance(key, bool):
            text += f'[{key}]'
        else:
            plain = isinstance(key, str) and key.isidentifier() and len(key) <= 60
            text += ('.' if text else '') + (str(key) if plain else reprlib.repr(key))
    return text


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`` Did you mean 'x'?`` when one of ``known`` is near to ``name``, else nothing."""
    near = difflib.get_close_matches(name.lower(), list(known), n=1, cutoff=0.6)
    return f' Did you mean {near[0]!r}?' if near else ''


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader; scalars that it cannot or should not convert are YAML errors."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        if node.tag == _INT_TAG and _MISREAD_INT.fullmatch(str(node.value)):
            problem = f'{node.value} would be read as octal or base 60; write the number in decimal'
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        try:
            return cast(Any, super()).construct_object(node, deep)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            problem = f'cannot read this value as {node.tag.rpartition(":")[2]}: {error}'
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from error


def read_file(path: str, source: str) -> str:
    """The text of a file that should hold a config.

    Args:
        path: The file.
        source: What to call it in messages.

    Raises:
        ConfigError: If there is none, or it is not UTF-8 text of a reasonable size.
    """
    try:
        with open(path, 'rb') as file:
            raw = file.read(_MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        folder = os.path.dirname(os.path.abspath(path))
        beside = os.listdir(folder) if os.access(folder, os.R_OK | os.X_OK) else []
        hint = did_you_mean(os.path.basename(path), beside)
        problem = f'no such file (looked for {os.path.abspath(path)}).{hint}'
    except IsADirectoryError:
        problem = 'this is a directory; give the path of one YAML file in it.'
    except (OSError, ValueError) as error:
        problem = f'cannot be read: {getattr(error, "strerror", None) or error}.'
    else:
        if len(raw) > _MAX_FILE_BYTES:
            problem = f'larger than {_MAX_FILE_BYTES:,} bytes, so this is not a config.'
        else:
            try:
                return raw.decode('utf-8-sig')
            except UnicodeDecodeError as error:
                problem = f'not UTF-8 text (byte {error.start}); save the file as UTF-8.'
    raise ConfigError(f'{source}: {problem}', source=source)


def parse(text: str, source: str) -> Document:
    """Reads one YAML document, merge keys and anchors resolved.

    Args:
        text: The document.
        source: What to call it in messages.

    Raises:
        ConfigError: If it is not YAML, or uses more of YAML than plain data.
    """
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        if root is None:
            return Document(None, {}, [])
        lines, duplicates = _survey(loader, root)
        return Document(cast(Any, loader).construct_document(root), lines, duplicates)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f':{mark.line + 1}:{mark.column + 1}' if mark else ''
        problem = ', '.join(part for part in (error.problem, error.context) if part)
        if 'could not determine a constructor' in problem:
            problem += '; a config holds plain values only, without YAML tags'
    except yaml.reader.ReaderError as error:
        where = f':{text.count(chr(10), 0, error.position) + 1}'
        code = error.character if isinstance(error.character, int) else ord(error.character[:1])
        problem = f'character U+{code:04X} is not allowed in YAML'
    except RecursionError:
        where, problem = '', 'nested too deeply'
    raise ConfigError(f'{source}{where}: not a valid YAML config: {problem}', source=source)


def _survey(
    loader: _Loader, root: yaml.Node
) -> tuple[dict[YamlPath, int], list[tuple[YamlPath, int, int]]]:
    """Lines of all keys, and keys given twice; before merge keys mix other mappings in."""
    lines: dict[YamlPath, int] = {(): root.start_mark.line + 1}
    duplicates: list[tuple[YamlPath, int, int]] = []
    seen_nodes: set[int] = set()
    todo: list[tuple[YamlPath, yaml.Node]] = [((), root)]
    while todo:
        path, node = todo.pop()
        if id(node) in seen_nodes:
            continue
        seen_nodes.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            for index, item in enumerate(node.value):
                lines[(*path, index)] = item.start_mark.line + 1
                todo.append(((*path, index), item))
        if not isinstance(node, yaml.MappingNode):
            continue
        own: dict[Hashable, int] = {}
        for key_node, value_node in node.value:
            if key_node.tag == _MERGE_TAG or not isinstance(key_node, yaml.ScalarNode):
                continue
            key = loader.construct_object(key_node)
            line = key_node.start_mark.line + 1
            if key in own:
                duplicates.append(((*path, key), own[key], line))
            own[key] = line
            lines[(*path, key)] = line
            todo.append(((*path, key), value_node))
    return lines, duplicates
