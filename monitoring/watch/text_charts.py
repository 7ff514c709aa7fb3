"""Curves and bars made of characters, for terminals."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.text import Text

_EIGHTHS_UP = " ▁▂▃▄▅▆▇█"
_EIGHTHS_RIGHT = " ▏▎▍▌▋▊▉█"
TRACK = "grey23"
"""Colour of a bar's empty part."""


def bar(share: float | None, width: int, colour: str) -> Text:
    """A bar that is filled to ``share`` (0 to 1); all track where it is not known."""
    filled = 0.0 if share is None or math.isnan(share) else min(1.0, max(0.0, share)) * width
    whole = int(filled)
    part = _EIGHTHS_RIGHT[round((filled - whole) * 8)] if whole < width else ""
    text = Text(no_wrap=True)
    text.append("█" * whole, colour)
    text.append(part, f"{colour} on {TRACK}")
    text.append(" " * (width - whole - len(part)), f"on {TRACK}")
    return text


def stacked_bar(parts: Sequence[tuple[float, str]], width: int) -> Text:
    """Parts end to end, each with its colour, as shares of their sum; rounded so that the whole is ``width`` wide."""
    whole, text, done, drawn = sum(value for value, _ in parts), Text(no_wrap=True), 0.0, 0
    for value, colour in parts:
        done += value
        end = round(width * done / whole) if whole > 0 else 0
        text.append("█" * (end - drawn), colour)
        drawn = end
    return text


def chart(values: Sequence[float | None], width: int, height: int, colour: str, low: float | None = None) -> Text:
    """A curve of filled columns, ``height`` lines high; each column is the mean of its share of the values.

    None and NaN leave gaps. ``low`` is what an empty column stands for; by default a little under the smallest value.
    """
    columns = _columns(values, width)
    known = [value for value in columns if value is not None]
    if not known:
        return Text("\n" * (height - 1))
    top = max(known)
    span = top - min(known)
    bottom = min(known) - max(0.08 * span, 1e-12) if low is None else min(low, min(known))
    scale = (top - bottom) or 1.0
    eighths = [0 if value is None else max(1, round((value - bottom) / scale * height * 8)) for value in columns]
    lines = []
    for line in reversed(range(height)):
        lines.append("".join(_EIGHTHS_UP[min(8, max(0, count - 8 * line))] for count in eighths))
    return Text("\n".join(lines), style=colour, no_wrap=True)


def _columns(values: Sequence[float | None], width: int) -> list[float | None]:
    """Means of equal shares; fewer values than columns are stretched, so that a curve always fills its width."""
    finite = [value if value is not None and math.isfinite(value) else None for value in values]
    if not finite:
        return []
    columns: list[float | None] = []
    for column in range(width):
        first = column * len(finite) // width
        last = max(first + 1, (column + 1) * len(finite) // width)
        known = [value for value in finite[first:last] if value is not None]
        columns.append(sum(known) / len(known) if known else None)
    return columns
