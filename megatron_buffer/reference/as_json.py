"""A comparison, the summary and two versions as plain data, for ``--json``. Upstream has no counterpart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_buffer.reference.catalog import Comparison
from megatron_buffer.reference.mapping import Difference, Entry, file_of
from megatron_buffer.reference.render_tables import counts
from megatron_buffer.reference.versions import HOW_TO_PROCEED, Change, Versions


def summary_as_dict(entries: Mapping[str, Entry], version: str) -> dict[str, Any]:
    """All symbols without their sources."""
    return {
        'megatron_core': version,
        'symbols': [entry_as_dict(entry) for entry in entries.values()],
        'counts': counts(entries),
    }


def entry_as_dict(entry: Entry) -> dict[str, Any]:
    """What the mapping says of a symbol."""
    return {
        'symbol': entry.symbol,
        'name': entry.name,
        'file': file_of(entry.symbol),
        'relation': entry.relation,
        'summary': entry.summary,
        'ours': [f'megatron_buffer.{name}' for name in entry.ours],
        'faults': list(entry.faults),
        'differences': [_difference(difference) for difference in entry.differences],
    }


def _difference(difference: Difference) -> dict[str, Any]:
    return {
        'kind': difference.kind,
        'why': difference.why,
        'fault': difference.fault or None,
        'config': difference.config or None,
    }


def comparison_as_dict(comparison: Comparison) -> dict[str, Any]:
    """A symbol with its sources: rows of lines, each with its number in the file."""
    return {
        **entry_as_dict(comparison.entry),
        'upstream_source': comparison.upstream.where,
        'our_sources': [piece.where for piece in comparison.ours],
        'rows': [
            {
                'change': row.change,
                'upstream': [list(line) for line in row.left],
                'ours': [list(line) for line in row.right],
                'difference': row.label,
                'where': row.where or None,
            }
            for row in comparison.rows
        ],
    }


def versions_as_dict(versions: Versions, changes: Mapping[str, Change]) -> dict[str, Any]:
    """What differs between two versions of upstream."""
    return {
        'older': versions.older,
        'newer': versions.newer,
        'installed': versions.installed,
        'notes': list(versions.notes),
        'symbols': [_change(symbol, change) for symbol, change in changes.items()],
    }


def _change(symbol: str, change: Change) -> dict[str, Any]:
    changed = change.status != 'unchanged'
    return {
        'symbol': symbol,
        'status': change.status,
        'relation': change.entry.relation,
        'ours': [f'megatron_buffer.{name}' for name in change.entry.ours],
        'how_to_proceed': HOW_TO_PROCEED[change.entry.relation] if changed else None,
        'diff': change.diff() if changed else [],
    }
