"""Search for the settings that train an experiment fastest.

    esmeray tune --config FILE [--tune FILE] [--section.key VALUE ...] [--tune.section.key VALUE ...]

Measures configurations on your data, model and machine and writes the fastest as best.yaml, which is an experiment like
FILE. Without --tune the search is that of train_config/tune_throughput.yaml; `esmeray train --tune FILE` does the same.
"""

from __future__ import annotations

from tools.train.run import SEARCH, start


def main(argv: list[str]) -> int:
    """Parse, check and search."""
    return start(argv, "tune", __doc__ or "", search=SEARCH)
