"""Find the largest token budget that fits into memory, and the fastest one.

    esmeray tune tokens --config FILE [--section.key VALUE ...] [--tune.section.key VALUE ...]

A search over token budgets alone, by train_config/tune_tokens.yaml, of about a minute. Prints the options to set.
--tune.inference measures forward passes alone, without gradients and optimizer.
"""

from __future__ import annotations

from tools.train.run import start

SEARCH = "train_config/tune_tokens.yaml"


def main(argv: list[str]) -> int:
    """Parse, check and search."""
    return start(argv, "tune tokens", __doc__ or "", search=SEARCH)
