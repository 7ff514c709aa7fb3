"""Train an experiment on a Ray cluster: ``esmeray train`` from the repository, see :mod:`tools.train.run`."""

import sys

from common.command_line import run
from tools.train.run import main

if __name__ == "__main__":
    sys.exit(run(main))
