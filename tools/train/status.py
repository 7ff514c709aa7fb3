"""Print the state of a run: step, speed, time left and what limits it.

Reads only the run's files: it can be used at any time, and on a folder that another machine writes to. With --follow it
prints anew until the run ends; Ctrl-C ends the following, not the run.

Examples:
  esmeray train status runs/esm2ae
  esmeray train status runs/esm2ae --follow
"""

import time
from pathlib import Path

from rich.live import Live
from rich.text import Text

from monitoring.watch.status import RunStatus
from tools.grammar import Plain, parse
from train_config.section import Section
from training.tasks.registry import metric_labels

EVERY_S = 1.0
"""Between two looks at the files."""


class Arguments(Plain):
    """The run, and whether to follow it."""

    run: Path
    """Folder of the run."""
    follow: bool = False
    """Print anew until the run ends."""


def main(argv: list[str]) -> int:
    arguments, _ = parse(argv, "train status", __doc__, Arguments, Section)
    status = RunStatus(arguments.run, metric_labels())
    status.update()
    if not arguments.follow:
        print("\n".join(status.lines()))
        return 0
    with Live(Text("\n".join(status.lines())), auto_refresh=False) as live:
        while not status.has_ended:
            time.sleep(EVERY_S)
            status.update()
            live.update(Text("\n".join(status.lines())), refresh=True)
    return 0
