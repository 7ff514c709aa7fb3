"""Numbers and names in words."""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any


def counted(number: int, noun: str) -> str:
    """A number and its noun, with the plural ending in braces: ``counted(2, "packed batch{es}")``."""
    endings = {"s": "", "es": "", "ies": "y"} if number == 1 else {"s": "s", "es": "es", "ies": "ies"}
    return f"{number:,} {noun.format(**endings)}"


UNUSABLE: dict[str, str] = {}
"""Reasons why additions of other packages can't be used, by name; esmeray/installation.py fills it."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Hint in brackets for an unknown name: the most similar known one, ignoring case; empty if none is similar.

    For an unusable addition of another package, or an option of it, the hint is the reason.
    """
    reasons = [UNUSABLE[part] for part in name.lstrip("-").split(".") if part in UNUSABLE]
    if reasons:
        return f" ({reasons[0]})"
    spelled = {word.lower(): word for word in sorted(known)}  # sorted: ties always give the same hint
    near = difflib.get_close_matches(name.lower(), spelled, n=1)
    return f" (did you mean {spelled[near[0]]}?)" if near else ""


def duration(seconds: float) -> str:
    """Seconds in short: ``45 s``, ``12:05`` (minutes), ``3:12:05`` (hours), ``2 d 3 h``."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24} d {hours % 24} h"
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def amount(value: float) -> str:
    """A count in about three digits: ``345``, ``12.3k``, ``1.23M``."""
    if value >= 999_950:
        return f"{value / 1e6:.2f}M"
    return f"{value / 1e3:.1f}k" if value >= 1000 else f"{value:.0f}"


def refusal(error: Mapping[str, Any]) -> str:
    """Message of one pydantic error, with the rejected value unless the message is Esmeray's own."""
    message: str = error["msg"].removeprefix("Value error, ")
    if error["type"] == "literal_error":
        message += did_you_mean(str(error["input"]), ())
    return (
        message if error["type"] == "value_error" else f"{message[0].lower()}{message[1:]}, got {error['input']!r:.200}"
    )


def shortened(text: str, longest: int) -> str:
    """Cut the middle of a text longer than ``longest`` characters: problem first, remedy last."""
    return text if len(text) <= longest else f"{text[: longest // 2]} ... {text[-longest // 2 :]}"


def first_line(error: BaseException) -> str:
    """First line of an error's message, or its type if the message is empty."""
    return _lines(error)[0]


def last_line(error: BaseException) -> str:
    """Last line of an error's message; Ray puts a traceback before it."""
    return _lines(error)[-1]


def _lines(error: BaseException) -> list[str]:
    return [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
