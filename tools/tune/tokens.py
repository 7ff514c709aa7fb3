"""Find the largest token budget that fits into memory, and the fastest one.

A search over token budgets alone, by train_config/tune_tokens.yaml, of about a minute. Prints the options to set.
--tune.inference true measures forward passes alone, without gradients and optimizer.

Example:
  esmeray tune tokens --config masked_lm
"""

from esmeray.tools.tune._search import search


def main(argv: list[str]) -> int:
    return search(argv, "tune tokens", __doc__ or "", "train_config/tune_tokens.yaml")
