"""Train an experiment on a Ray cluster, or search for the settings that train it fastest.

    python train_ray.py --config FILE [--section.key VALUE ...]
    python train_ray.py --config FILE --dry-run
    python train_ray.py --config FILE --tune train_config/tune_throughput.yaml [--tune.section.key VALUE ...]

Connects to the Ray cluster at hand or starts a local one, prepares the data once, trains with one worker a device and
prints where the result is. The same command resumes a run of the same name that stopped. With --tune it measures
configurations instead and writes the fastest as best.yaml, which is an experiment like FILE.

An option overrides the file. Lists take several values; none clears an optional setting and empties a list.

Example: python train_ray.py --config train_config/esm2ae.yaml --data.source proteins.fasta.gz --run.name first
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

from common.command_line import run
from common.errors import ConfigError
from train_config.loading import load_config, load_tune_config, split_overrides

EXAMPLES = {"--config": "train_config/esm2ae.yaml", "--tune": "train_config/tune_throughput.yaml"}


@dataclass
class Arguments:
    """The command line, sorted."""

    path: str | None = None
    tune_path: str | None = None
    dry: bool = False
    wants_help: bool = False
    overrides: list[str] = field(default_factory=list)
    tune_overrides: list[str] = field(default_factory=list)


def main(arguments: list[str]) -> int:
    """Parse, check, train or search."""
    given = split_arguments(arguments)
    if given.wants_help:
        from train_config.help import print_help

        print_help(given.path, __doc__ or "", given.tune_path)
        return 0
    if given.path is None:
        raise ConfigError(
            "--config: no experiment is named; usage: train_ray.py --config FILE [--section.key VALUE ...], for "
            f"example --config {EXAMPLES['--config']} (see --help)"
        )
    config = load_config(given.path, given.overrides)
    if given.tune_path is not None:
        search = load_tune_config(given.tune_path, given.tune_overrides)
        from tuning.run import dry_run_tune, tune

        return dry_run_tune(config, search) if given.dry else tune(config, search)
    from training.launch.driver import dry_run, train

    return dry_run(config) if given.dry else train(config)


def split_arguments(arguments: list[str]) -> Arguments:
    """Separate --config, --tune, --dry-run and --help from the overrides.

    Raises:
        ConfigError: --config or --tune without a file, or options of a search without one.
    """
    given = Arguments()
    others = []
    rest = iter(arguments)
    for argument in rest:
        option, _, inline = argument.partition("=")
        if option in EXAMPLES:
            path = inline or next(rest, "")
            if not path or path.startswith("--"):
                raise ConfigError(f"{option}: the file is missing, for example {option} {EXAMPLES[option]}")
            if option == "--config":
                given.path = path
            else:
                given.tune_path = path
        elif argument == "--dry-run":
            given.dry = True
        elif argument in ("-h", "--help"):
            given.wants_help = True
        else:
            others.append(argument)
    given.overrides, given.tune_overrides = split_overrides(others)
    if given.tune_overrides and given.tune_path is None:
        raise ConfigError(
            f"{given.tune_overrides[0]}: is of a search, and there is none: add --tune {EXAMPLES['--tune']}"
        )
    return given


if __name__ == "__main__":
    sys.exit(run(main, sys.argv[1:]))
