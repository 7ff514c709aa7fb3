"""Search over the settings of an experiment, described by the file of ``--tune`` or by the command's default file."""

from esmeray.cluster.placement import find
from esmeray.common.errors import ConfigError
from esmeray.tools.grammar import Command, example_of, read_words
from esmeray.train_config.loading import load_settings
from esmeray.training.config import Config, load_config
from esmeray.tuning.section import TuneConfig


class Arguments(Command, Config):
    """Options of the command."""

    tune_: str | None = None
    """YAML file that describes the search."""
    dry_run: bool = False
    """Print the resolved settings and the plan without starting anything."""
    tune: TuneConfig = TuneConfig()


def search(command: str, text: str | None, file: str, argv: list[str]) -> int:
    """Run the search described by ``file``, unless ``--tune`` names another file. Returns the exit code."""
    words, overrides = read_words(argv, command, text, Arguments)
    if words.config is None:
        raise ConfigError(f"missing: --config; {example_of(text, command)}")
    # The search has its own file, in which its settings have no prefix ``tune``.
    config = load_config(words.config, {key: value for key, value in overrides.items() if key[0] != "tune"})
    config.storage.apply()
    if config.data.predictions.model is not None:
        raise ConfigError(
            "data.predictions.model: a search doesn't predict structures; predict them first (esmeray design fold) and "
            "leave this out"
        )
    if not words.dry_run:
        find(config.ray)  # raises early if the cluster can't be used, before Ray Tune is loaded
    from esmeray.tuning.records import Job
    from esmeray.tuning.run import dry_run_tune, tune

    of_search = {key[1:]: value for key, value in overrides.items() if key[0] == "tune"}
    job = Job(config, load_settings(TuneConfig, words.tune_ or file, of_search, "tune."))
    return dry_run_tune(job) if words.dry_run else tune(job)
