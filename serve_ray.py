"""Serve models over HTTP on a Ray cluster: ``esmeray serve run`` from the repository, see
:mod:`esmeray.tools.serve.run`."""

from esmeray.common.command_line import end_process
from esmeray.tools.serve.run import main

if __name__ == "__main__":
    end_process(main)
