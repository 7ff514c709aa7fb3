"""Train an experiment on a Ray cluster.

    python train_ray.py --config FILE [--section.key VALUE ...]
    python train_ray.py --config FILE --dry-run

Connects to the Ray cluster at hand or starts a local one, prepares the data once, trains with one worker a device and
prints where the result is. The same command goes on where a run of the same name stopped.

Example: python train_ray.py --config train_config/esm2ae.yaml --data.source proteins.fasta.gz --run.name first
"""

from __future__ import annotations

import sys

from train_config.command_line import run
from train_config.errors import ConfigError
from train_config.loading import load_config


def main(arguments: list[str]) -> int:
    """Parse, check, train."""
    path, dry, wants_help, overrides = split_arguments(arguments)
    if wants_help:
        from train_config.help import print_help

        print_help(path, __doc__ or "")
        return 0
    config = load_config(path, overrides)
    from training.driver import dry_run, train

    return dry_run(config) if dry else train(config)


def split_arguments(arguments: list[str]) -> tuple[str | None, bool, bool, list[str]]:
    """Separate --config, --dry-run and --help from the overrides.

    Raises:
        ConfigError: --config without a file.
    """
    path, dry, wants_help, overrides = None, False, False, []
    rest = iter(arguments)
    for argument in rest:
        if argument == "--config" or argument.startswith("--config="):
            path = argument.partition("=")[2] or next(rest, "")
            if not path or path.startswith("--"):
                raise ConfigError("--config: the file is missing, for example --config train_config/esm2ae.yaml")
        elif argument == "--dry-run":
            dry = True
        elif argument in ("-h", "--help"):
            wants_help = True
        else:
            overrides.append(argument)
    return path, dry, wants_help, overrides


if __name__ == "__main__":
    sys.exit(run(main, sys.argv[1:]))
