"""Serve models over HTTP on a Ray cluster: ``esmeray serve run`` from the repository, see
:mod:`esmeray.tools.serve.run`."""

import sys

from esmeray.common.command_line import run
from esmeray.tools.serve.run import main

if __name__ == "__main__":
    sys.exit(run(main))
