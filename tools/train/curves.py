"""Draw the losses of several runs in one picture, over the time of training and over tokens.

Thin lines are the loss of training, thick ones that of validation. Time in which a run was stopped does not count.

Examples:
  esmeray train curves runs/first runs/second
  esmeray train curves runs/first runs/second --output comparison.png --overwrite
"""

from pathlib import Path

from esmeray.common.errors import ConfigError
from esmeray.run_folder.metrics_log import read_metrics
from esmeray.tools.grammar import Overwriting, command


class Arguments(Overwriting):
    """The runs, and where the picture goes."""

    made_by = "train_curves"

    run: list[Path]
    """Folders of the runs."""
    output: Path = Path("curves.png")
    """PNG to make (default: curves.png)."""


@command("train curves", __doc__, Arguments)
def main(arguments: Arguments) -> None:
    names = [path.resolve().name for path in arguments.run]
    repeated = {name for name in names if names.count(name) > 1}
    if repeated:  # the legend would have two lines of one name
        raise ConfigError(f"{min(repeated)}: two runs have this name; rename a folder")
    runs = {name: read_metrics(path / "metrics.jsonl") for name, path in zip(names, arguments.run, strict=True)}
    from esmeray.monitoring.watch.curves import draw_comparison  # here: it loads Matplotlib

    with arguments.made_file(arguments.output.absolute()) as building:
        draw_comparison(runs, building)
    print(arguments.output)
