"""A search over the settings of an experiment, as the file of ``--tune`` or the command itself describes it."""

from esmeray.cluster.placement import find
from esmeray.common.errors import ConfigError
from esmeray.tools.grammar import Command, example_of, read_words
from esmeray.train_config.loading import load_settings
from esmeray.training.config import Config, load_config
from esmeray.tuning.section import TuneConfig


class Arguments(Command, Config):
    """Actions on the experiment."""

    tune_: str | None = None
    """YAML file of the search."""
    dry_run: bool = False
    """Print the resolved settings and the plan, and start nothing."""
    tune: TuneConfig = TuneConfig()


def search(command: str, text: str | None, file: str, argv: list[str]) -> int:
    """Search as ``file`` says, where the options name no other."""
    words, overrides = read_words(argv, command, text, Arguments)
    if words.config is None:
        raise ConfigError(f"missing: --config; {example_of(text, command)}")
    # The search has a file of its own, in which its settings have no prefix.
    config = load_config(words.config, {key: value for key, value in overrides.items() if key[0] != "tune"})
    config.storage.apply()
    if config.data.predictions.model is not None:
        raise ConfigError("data.predictions.model: nobody predicts beside a search; predict first, and leave it out")
    if not words.dry_run:
        find(config.ray)  # a cluster that can't be used is refused before what a search needs is loaded
    from esmeray.tuning.records import Job
    from esmeray.tuning.run import dry_run_tune, tune

    of_search = {key[1:]: value for key, value in overrides.items() if key[0] == "tune"}
    job = Job(config, load_settings(TuneConfig, words.tune_ or file, of_search, "tune."))
    return dry_run_tune(job) if words.dry_run else tune(job)
