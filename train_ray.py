"""Train an experiment on a Ray cluster: ``esmeray train`` from the repository, see :mod:`esmeray.tools.train.run`."""

import sys

from esmeray.common.command_line import run
from esmeray.tools.train.run import main

if __name__ == "__main__":
    sys.exit(run(main))
