"""A search over the settings of an experiment, as the file of ``--tune`` or the command itself describes it."""

from esmeray.cluster.placement import find
from esmeray.common.errors import ConfigError
from esmeray.tools.grammar import Plain, example_of, read_words
from esmeray.train_config.loading import load_config, load_tune_config
from esmeray.train_config.schema import Config
from esmeray.train_config.tune_schema import TuneConfig


class Arguments(Plain):
    """What to do with the experiment."""

    tune: str | None = None
    """YAML file of the search."""
    dry_run: bool = False
    """Print the resolved settings and the plan, and start nothing."""


class TuneSettings(Config):
    """An experiment and the search over it."""

    tune: TuneConfig = TuneConfig()


def search(argv: list[str], command: str, text: str, file: str) -> int:
    """Search as ``file`` says, where the options name no other."""
    flags, experiment, overrides = read_words(argv, command, text, Arguments, TuneSettings)
    if experiment is None:
        raise ConfigError(f"missing: --config; {example_of(text, command)}")
    config = load_config(experiment, {key: value for key, value in overrides.items() if key[0] != "tune"})
    config.storage.apply()
    if config.data.predictions.model is not None:
        raise ConfigError("data.predictions.model: nobody predicts beside a search; predict first, and leave it out")
    if not flags.dry_run:
        find(config.ray)  # a cluster that can't be used is refused before what a search needs is loaded
    from esmeray.tuning.records import Job
    from esmeray.tuning.run import dry_run_tune, tune

    of_search = {key[1:]: value for key, value in overrides.items() if key[0] == "tune"}
    job = Job(config, load_tune_config(flags.tune or file, of_search))
    return dry_run_tune(job) if flags.dry_run else tune(job)
