"""Numbers in words."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """A number and its noun, the ending of whose plural stands in braces: ``counted(2, "packed batch{es}")``."""
    endings = {"s": "", "es": "", "ies": "y"} if number == 1 else {"s": "s", "es": "es", "ies": "ies"}
    return f"{number:,} {noun.format(**endings)}"
