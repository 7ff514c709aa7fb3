"""Print the state of a run: step, speed, time left and what limits the speed.

Reads only the run's files, so it works at any time, also for a folder that another machine writes to. --follow
refreshes the output until the run has finished or failed. It waits for a run that has not started yet, and for a
stopped or killed run, which may be resumed. Ctrl-C stops following, not the run.

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
"""Seconds between two readings of the files."""


@command("train status", __doc__)
def main(
    run: Annotated[Path, Field(description="Folder of the run.")],
    follow: Annotated[bool, Field(description="Refresh until the run has finished or failed.")] = False,
) -> None:
    status = _begun(run, wait=follow)
    status.update()
    if not follow:
        print("\n".join(status.lines()))
        return
    # Refreshed explicitly: the thread of rich's auto_refresh would redraw unchanged lines.
    with Live(Text("\n".join(status.lines())), auto_refresh=False) as live:
        while not status.has_ended:  # a killed run has not ended: it may be resumed
            time.sleep(EVERY_S)
            status.update()
            live.update(Text("\n".join(status.lines())), refresh=True)


def _begun(folder: Path, *, wait: bool) -> RunStatus:
    """Return the status of the run. With ``wait``, wait for its folder, which appears when its data are prepared."""
    is_reported = False
    while True:
        try:
            return RunStatus(folder, metric_labels())
        except ConfigError as error:
            if not wait:
                raise
            if not is_reported:
                say(f"waiting for the run to start: {error}; press Ctrl-C to stop waiting")
                is_reported = True
        time.sleep(EVERY_S)
