"""Search for the settings that train an experiment fastest.

Measures configurations on your data, model and machine and writes the fastest as best.yaml, which is an experiment like
FILE. Without --tune the search is that of train_config/tune_throughput.yaml.

Example:
  esmeray tune --config masked_lm --tune.search.max_trials 20
"""

from functools import partial

from esmeray.tools.tune._search import search

main = partial(search, "tune", __doc__, "train_config/tune_throughput.yaml")
