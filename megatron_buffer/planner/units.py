"""Numbers of elements, bytes and seconds in three or four digits, for tables."""

from __future__ import annotations

_UNITS = (('GB', 10**9), ('MB', 10**6), ('kB', 10**3))


def size(num_bytes: int) -> str:
    """Decimal bytes in four digits or so: ``7.50 GB``."""
    for unit, scale in _UNITS:
        if num_bytes >= scale:
            value = num_bytes / scale
            return f'{value:,.{1 if value >= 100 else 2}f} {unit}'
    return f'{num_bytes} B' if num_bytes else '-'


def amount(elems: int) -> str:
    """A number of elements in three or four digits: ``8.03 B``, ``524.3 M``, ``4,096``."""
    for unit, scale in (('B', 10**9), ('M', 10**6)):
        if elems >= scale:
            return f'{elems / scale:.{2 if unit == "B" else 1}f} {unit}'
    return f'{elems:,}'


def duration(seconds: float) -> str:
    """A time in three or four digits: ``1.234 s``, ``12.3 ms``, ``250 us``."""
    for unit, scale in (('s', 1.0), ('ms', 1e-3), ('us', 1e-6)):
        if abs(seconds) >= scale or unit == 'us':
            value = seconds / scale
            digits = 3 if abs(value) < 10 else 2 if abs(value) < 100 else 1
            return f'{value:,.{digits}f} {unit}' if seconds else '0'
    return '0'
