"""Search for the settings that train an experiment fastest.

Measures configurations with your data, model and machine. The fastest is written as best.yaml, an experiment file like
FILE. Without --tune, train_config/tune_throughput.yaml describes the search.

Example:
  esmeray tune --config masked_lm --tune.search.max_trials 20
"""

from functools import partial

from esmeray.tools.tune._search import search

main = partial(search, "tune", __doc__, "train_config/tune_throughput.yaml")
