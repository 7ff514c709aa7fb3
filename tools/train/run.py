"""Train an experiment on a Ray cluster, or resume it.

FILE is yours, or one of train_config/, also as its name alone: esm2ae, masked_lm, masked_lm_150M, my_classifier,
protein_classifier, text_classifier, structdiff, function, function_classifier.

Connects to the Ray cluster at hand or starts a local one, prepares the data once, trains with one worker a device and
prints where the result is. The same command resumes a run of the same name that stopped. With --tune it measures
configurations instead and writes the fastest as best.yaml, which is an experiment like FILE.

An option overrides the file. Lists take several values; none clears an optional setting and empties a list.

Examples:
  esmeray train --config esm2ae --data.source proteins.fasta.gz --run.name first
  esmeray train --config masked_lm --data.source proteins.fasta.gz
  esmeray train --config my_classifier --data.source proteins.csv
  esmeray train --config masked_lm --ray.address HOST:6379 --run.storage_path /shared/runs --data.stage_dir /tmp/stores
  esmeray train --config esm2ae --dry_run
  esmeray train --config esm2ae --tune train_config/tune_throughput.yaml
"""

from esmeray.cluster.placement import find
from esmeray.common.errors import ConfigError
from esmeray.tools.grammar import Plain, example_of, read_words
from esmeray.tools.train._experiment import trained
from esmeray.train_config.loading import load_config, load_tune_config
from esmeray.train_config.schema import Config
from esmeray.train_config.tune_schema import TuneConfig

SEARCH = "train_config/tune_throughput.yaml"


class Arguments(Plain):
    """What to do with the experiment."""

    tune: str | None = None
    """YAML file of a search: measure configurations instead of training."""
    dry_run: bool = False
    """Print the resolved settings and the plan, and start nothing."""


class TuneSettings(Config):
    """An experiment and the search over it."""

    tune: TuneConfig = TuneConfig()


def main(argv: list[str]) -> int:
    return start(argv, "train", __doc__ or "")


def start(argv: list[str], command: str, text: str, search: str | None = None) -> int:
    """Train; or search, as the file of ``--tune`` says, or else ``search``."""
    searches = search is not None or any(word.partition("=")[0] == "--tune" for word in argv)
    flags, file, overrides = read_words(
        argv, command, text, Arguments, TuneSettings if searches else Config, TuneSettings
    )
    own = {key: value for key, value in overrides.items() if key[0] != "tune"}
    of_search = {key[1:]: value for key, value in overrides.items() if key[0] == "tune"}
    if file is None:
        raise ConfigError(f"missing: --config; {example_of(text, command)}")
    tune_file = flags.tune or search
    if of_search and tune_file is None:
        option = ".".join(("--tune", *next(iter(of_search))))
        raise ConfigError(f"{option}: is of a search, and there is none: add --tune {SEARCH}")
    if tune_file is None and not flags.dry_run:
        code, _ = trained(file, own)
        return code
    config = load_config(file, own)
    config.storage.apply()
    if tune_file is None:
        from esmeray.training.launch.driver import dry_run

        return dry_run(config)
    if config.data.predictions.model is not None:
        raise ConfigError("data.predictions.model: nobody predicts beside a search; predict first, and leave it out")
    if not flags.dry_run:
        find(config.ray)  # a cluster that can't be used is refused before what a search needs is loaded
    from esmeray.tuning.run import dry_run_tune, tune

    settings = load_tune_config(tune_file, of_search)
    return dry_run_tune(config, settings) if flags.dry_run else tune(config, settings)
