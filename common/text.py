"""Numbers and names in words."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def counted(number: int, noun: str) -> str:
    """A number and its noun, the ending of whose plural stands in braces: ``counted(2, "packed batch{es}")``."""
    endings = {"s": "", "es": "", "ies": "y"} if number == 1 else {"s": "s", "es": "es", "ies": "ies"}
    return f"{number:,} {noun.format(**endings)}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A question in brackets with the known name that is most like ``name``; empty where none is."""
    near = difflib.get_close_matches(name, sorted(known), n=1)
    return f" (did you mean {near[0]}?)" if near else ""
