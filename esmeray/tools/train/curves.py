"""Draw the losses of several runs in one picture, over training time and over tokens.

Thin lines are training losses, thick lines validation losses. Time while a run was stopped does not count.

Examples:
  esmeray train curves runs/first runs/second
  esmeray train curves runs/first runs/second --output comparison.png --overwrite
"""

from pathlib import Path
from typing import Annotated

from pydantic import Field

from esmeray.common.errors import ConfigError
from esmeray.run_folder.metrics_log import read_metrics
from esmeray.tools.grammar import OutputWriter, command


@command("train curves", __doc__, made_by="train_curves")
def main(
    run: Annotated[list[Path], Field(description="Folders of the runs.")],
    writer: OutputWriter,
    output: Annotated[Path, Field(description="PNG file to write (default: curves.png).")] = Path("curves.png"),
) -> None:
    names = [path.resolve().name for path in run]
    repeated = {name for name in names if names.count(name) > 1}
    if repeated:  # the legend would have two lines with the same name
        raise ConfigError(f"{min(repeated)}: two runs have this name; rename a folder")
    runs = {name: read_metrics(path / "metrics.jsonl") for name, path in zip(names, run, strict=True)}
    from esmeray.monitoring.watch.curves import draw_comparison  # imported here: it loads Matplotlib

    with writer.file(output.absolute()) as building:
        draw_comparison(runs, building)
    print(output)
