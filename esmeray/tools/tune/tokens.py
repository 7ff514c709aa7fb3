"""Find the largest token budget that fits into memory, and the fastest one.

Searches over token budgets only, as described in train_config/tune_tokens.yaml. Takes about a minute and prints the
options to set.

Example:
  esmeray tune tokens --config masked_lm
"""

from functools import partial

from esmeray.tools.tune._search import search

main = partial(search, "tune tokens", __doc__, "train_config/tune_tokens.yaml")
