"""Targets that are not known, in arrays and in tensors alike. Nothing here needs torch."""

from typing import Any

IGNORED_TARGET = -100
"""Class that no loss looks at (PyTorch's ``ignore_index`` default)."""


def has_target(targets: Any) -> Any:
    """(T,) or (N,) bool: the tokens or sequences of which a target is known; losses are divided by their count.

    ``targets``: classes, (T,) or (N,) integers; or (N, C) numbers, of which one or more in a row is not NaN.
    """
    # NaN alone differs from itself.
    return (targets == targets).any(-1) if targets.ndim == 2 else targets != IGNORED_TARGET
