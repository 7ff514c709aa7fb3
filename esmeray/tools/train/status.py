"""Print the state of a run: step, speed, time left and what limits it.

Reads only the run's files: it can be used at any time, and on a folder that another machine writes to. With --follow it
prints anew until the run has finished or failed: a run that is not there yet is waited for, and one that was stopped or
killed, which may be resumed. Ctrl-C ends the following, not the run.

Examples:
  esmeray train status runs/esm2ae
  esmeray train status runs/esm2ae --follow
"""

import time
from pathlib import Path
from typing import Annotated

from pydantic import Field
from rich.live import Live
from rich.text import Text

from esmeray.common.command_line import say
from esmeray.common.errors import ConfigError
from esmeray.monitoring.watch.status import RunStatus
from esmeray.tasks.registry import metric_labels
from esmeray.tools.grammar import command

EVERY_S = 1.0
"""Between two looks at the files."""


@command("train status", __doc__)
def main(
    run: Annotated[Path, Field(description="Folder of the run.")],
    follow: Annotated[bool, Field(description="Print anew until the run has finished or failed.")] = False,
) -> None:
    status = _begun(run, wait=follow)
    status.update()
    if not follow:
        print("\n".join(status.lines()))
        return
    # Refreshed by hand: a thread of rich's own would redraw lines that have not changed.
    with Live(Text("\n".join(status.lines())), auto_refresh=False) as live:
        while not status.has_ended:  # a killed run has not: it may be resumed
            time.sleep(EVERY_S)
            status.update()
            live.update(Text("\n".join(status.lines())), refresh=True)


def _begun(folder: Path, *, wait: bool) -> RunStatus:
    """The run, maybe once it has begun: its folder appears when its data are prepared."""
    is_reported = False
    while True:
        try:
            return RunStatus(folder, metric_labels())
        except ConfigError as error:
            if not wait:
                raise
            if not is_reported:
                say(f"waiting for the run to begin: {error}; Ctrl-C ends the waiting")
                is_reported = True
        time.sleep(EVERY_S)
