"""Train an experiment on a Ray cluster, as ``esmeray train``; or search with ``--tune FILE``, as ``esmeray tune``."""

from esmeray.common.command_line import end_process
from esmeray.tools.train.run import main as train
from esmeray.tools.tune.run import main as tune


def main(argv: list[str]) -> int:
    return (tune if any(word.partition("=")[0] == "--tune" for word in argv) else train)(argv)


if __name__ == "__main__":
    end_process(main)
