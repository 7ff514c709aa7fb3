"""Find the largest token budget that fits into memory, and the fastest one.

A search over token budgets alone, by train_config/tune_tokens.yaml, of about a minute. Prints the options to set.
--tune.inference true measures forward passes alone, without gradients and optimizer.

Example:
  esmeray tune tokens --config masked_lm
"""

from functools import partial

from esmeray.tools.tune._search import search

main = partial(search, "tune tokens", __doc__, "train_config/tune_tokens.yaml")
