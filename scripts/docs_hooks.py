"""What mkdocs cannot do by itself for our site: pages made from the code, and links out of ``docs/``.

The pages under ``docs/`` are written for a file viewer first. Here a link to a file outside ``docs/`` becomes
the file's path, since a site has no such page; a path of a page in backquotes becomes a link; and a page
that a checkout does not have is left out of the navigation. The pages under ``ref/`` come from
:mod:`docs_pages`. mkdocs calls the functions by their names.
"""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(Path(__file__).resolve().parent), str(ROOT)]

import docs_pages  # noqa: E402

LINK = re.compile(r'\[(?P<text>[^\]\n]+)\]\((?P<target>[^)\s:#]+)(?P<anchor>#[^)\s]*)?\)')
PAGE_PATH = re.compile(r'(?<!\[)`docs/(?P<page>[a-z0-9_/]+\.md)`')
STYLE = """
/* Tables of the commands are 120 columns wide. */
.md-grid { max-width: 82rem; }
.md-typeset pre > code { font-size: .62rem; }
"""
FENCE = re.compile(r'^ *(```|~~~)', re.MULTILINE)


def on_config(config: Any) -> Any:
    """Leaves pages that are not there out of the navigation."""
    docs = Path(config.docs_dir)

    def there(item: Any) -> bool:
        (target,) = item.values()
        if isinstance(target, list):
            target[:] = [inner for inner in target if there(inner)]
            return bool(target)
        return target in docs_pages.PAGES or (docs / target).is_file()

    config.nav[:] = [item for item in config.nav if there(item)]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages that are made from the code, and the style sheet."""
    for name, make in docs_pages.PAGES.items():
        files.append(File.generated(config, name, content=make()))
    files.append(File.generated(config, 'site.css', content=STYLE))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Makes the links of a page fit for the site; code blocks stay as they are."""
    here = page.file.src_uri
    parts = FENCE.split(markdown)
    # Text, fence, inside of a block, fence, text, ...: every fourth part from the first on is text.
    for i in range(0, len(parts), 4):
        parts[i] = links_for_site(parts[i], here, {file.src_uri for file in files})
    return ''.join(parts)


def links_for_site(text: str, here: str, pages: set[str]) -> str:
    """The text of page ``here`` with links that a site can follow.

    Args:
        text: Markdown without code blocks.
        here: Path of its page below ``docs/``.
        pages: Paths of all pages below ``docs/``.

    Raises:
        FileNotFoundError: A link leads to a file outside ``docs/`` that does not exist.
    """
    folder = posixpath.dirname(here)

    def outside(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join('docs', folder, match['target']))
        if path.startswith('docs/'):
            return match[0]
        if not (ROOT / path).exists():
            raise FileNotFoundError(f'docs/{here} links to {path}, which does not exist')
        text = match['text']
        return text if path in text else f'{text} (`{path}`)'

    def link(match: re.Match[str]) -> str:
        target = match['page']
        if target not in pages or target == here:
            return match[0]
        return f'[{match[0]}]({posixpath.relpath(target, folder or ".")})'

    return PAGE_PATH.sub(link, LINK.sub(outside, text))
