"""Watch a run at the terminal: progress, speed, loss, devices, workers and warnings, kept up to date.

Reads only the run's files: it can be started and ended at any time, before the run begins and after its end, and on a
folder that another machine writes to. Ctrl-C ends the watching, not the run; with the run it ends by itself.

Examples:
  python -m tools watch runs/esm2ae
  python -m tools watch /shared/runs/esm2ae --interval 5
  python -m tools watch runs/esm2ae --once
  python -m tools watch runs/esm2ae --once --svg picture.svg
"""

from __future__ import annotations

import io
import os
import re
import time
from pathlib import Path
from typing import Annotated

import tyro
from pydantic import Field, PositiveFloat
from rich.console import Console
from rich.live import Live

from common.arguments import ToolArguments, parse
from common.errors import ConfigError
from common.publishing import made_file, refuse_file
from common.text import did_you_mean
from monitoring.watch.run_state import RunState
from monitoring.watch.run_view import draw_run
from run_folder.paths import RunFolder

MADE_BY = "watch"
_PLAIN_WIDTH = 100
_MOST_NAMED = 8
_SVG_WIDTH = 110
_SVG_FONT = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"


class Arguments(ToolArguments):
    """The run to show, and how."""

    run: Annotated[Path, tyro.conf.Positional] = Field(description="Folder of the run.")
    once: Annotated[bool, tyro.conf.FlagCreatePairsOff] = Field(False, description="Print one picture and end.")
    interval: PositiveFloat = Field(1.0, description="Seconds between looks at the files.")
    svg: Path | None = Field(None, description="Also write the last picture to this file, as SVG.")
    overwrite: Annotated[bool, tyro.conf.FlagCreatePairsOff] = Field(False, description="Replace that file.")


def main(argv: list[str]) -> int:
    """Show the run until it ends."""
    arguments = parse(Arguments, argv, "watch", __doc__)
    if arguments.svg is not None:
        refuse_file(arguments.svg, MADE_BY, arguments.overwrite)
    _refuse_what_is_no_run(arguments.run.resolve(), arguments.once)
    state = RunState(arguments.run)
    state.update()
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=int(os.environ.get("COLUMNS") or _PLAIN_WIDTH))
    if console.is_terminal and not arguments.once and not state.has_ended:
        _watch(state, console, arguments.interval)
    console.print(draw_run(state, time.time(), console.width))
    if arguments.svg is not None:
        _write_svg(state, arguments.svg, arguments.overwrite)
    return 0


def _watch(state: RunState, console: Console, interval_s: float) -> None:
    """Until the run has ended, or Ctrl-C."""
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while not state.has_ended:
                live.update(draw_run(state, time.time(), console.width), refresh=True)
                time.sleep(interval_s)
                state.update()
    except KeyboardInterrupt:
        return


def _refuse_what_is_no_run(folder: Path, once: bool) -> None:
    """A folder that is not there yet may become a run; a file, or a folder of something else, won't."""
    if any((folder / name).exists() for name in ("tune.yaml", "trials.jsonl")):
        raise ConfigError(f"{folder} is a throughput search, which is no run to watch; see its tune_report.html")
    run = RunFolder(folder.parent, folder.name)
    if any(path.exists() for path in (run.config, run.metrics, run.monitoring, run.lock)):
        return
    may_begin = not any(folder.iterdir()) if folder.is_dir() else folder.parent.is_dir() and not folder.exists()
    if once or not may_begin:
        inside = ", ".join(_runs_in(folder)[:_MOST_NAMED])
        hint = f"; it holds the runs {inside}" if inside else did_you_mean(folder.name, _runs_in(folder.parent))
        raise ConfigError(f"{folder} is not the folder of a run: it has no config.yaml{hint}")


def _runs_in(folder: Path) -> list[str]:
    return sorted(path.parent.name for path in folder.glob("*/config.yaml"))


def _write_svg(state: RunState, path: Path, overwrite: bool) -> None:
    console = Console(record=True, width=_SVG_WIDTH, file=io.StringIO(), highlight=False, color_system="truecolor")
    console._force_terminal = True
    console.print(draw_run(state, time.time(), _SVG_WIDTH))
    svg = console.export_svg(title=f"python -m tools watch {state.files.path.name}")
    svg = re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL)  # rich's font would be fetched from elsewhere
    with made_file(path, MADE_BY, overwrite) as building:
        building.write_text(svg.replace("Fira Code, monospace", _SVG_FONT), encoding="utf-8")
