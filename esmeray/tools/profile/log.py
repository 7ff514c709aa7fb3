"""Report utilisation, idle share, memory and throttling from a log of GPUs, with advice.

Reads a CSV written by nvidia-smi (below), draws it and prints a summary per GPU. Throttling is detected from throttle
reasons and from clocks.

Examples:
  esmeray profile log gpus.csv --profile.output gpus.png
  FIELDS=timestamp,index,uuid,name,utilization.gpu,memory.used,memory.total,temperature.gpu,power.draw
  FIELDS=$FIELDS,enforced.power.limit,clocks.sm,clocks.max.sm,clocks_event_reasons.active
  nvidia-smi -l 1 --format=csv --query-gpu=$FIELDS > gpus.csv
"""

from pathlib import Path
from typing import Annotated

from pydantic import Field
from rich.text import Text

from esmeray.common.command_line import result_console
from esmeray.common.errors import ConfigError
from esmeray.tools.grammar import OutputWriter, command
from esmeray.train_config.section import Section


class LogProfileSection(Section):
    """File made from a GPU log."""

    output: str | None = None
    """PNG file to draw the log to. Default: the log's path with the ending .png."""


@command("profile log", __doc__, made_by="profile log")
def main(
    log: Annotated[Path, Field(description="CSV file written by nvidia-smi.")],
    profile: LogProfileSection,
    writer: OutputWriter,
) -> None:
    # Imported here: they load pandas and Matplotlib.
    from esmeray.monitoring.gpu_log.analysis import interval_s, summarise
    from esmeray.monitoring.gpu_log.plot import draw_log
    from esmeray.monitoring.gpu_log.reader import TIME, read_gpu_log

    output = Path(profile.output or log.with_suffix(".png"))
    if output.resolve() == log.resolve():
        raise ConfigError(f"{output} is the log itself; choose another output file")
    writer.refuse_file(output)
    samples = read_gpu_log(log)
    summaries = summarise(samples)
    with writer.file(output) as building:
        draw_log(samples, summaries, building)
    console = result_console()
    table = next(iter(samples.gpus.values()))  # nvidia-smi samples all GPUs at once, so that all have the same times
    console.print(Text(f"{log}: {table[TIME].iloc[-1]:.0f} s, one sample every {interval_s(table):.2g} s"))
    for summary in summaries:
        console.print(Text(f"\n{summary}", style="bold"))
        for advice in summary.advice:
            console.print(Text.assemble("  ", (advice.topic, "yellow"), f": {advice.finding}"))
            for action in advice.actions:
                console.print(Text(f"    to do: {action.text}"))
        for note in summary.notes:
            console.print(Text(f"  {note}", style="dim"))
    print(f"written: {output}")
