"""Options of a tool, and settings of the run's config that stand among them as ``--data.labels.kind binary``."""

from __future__ import annotations

from pathlib import Path

from train_config.errors import ConfigError

Arguments = list[str]


def split_overrides(argv: Arguments) -> tuple[Arguments, Arguments]:
    """The tool's own arguments, and those that override the config: an option with a dot, with what follows it.

    Positional arguments therefore come before the settings.
    """
    own: Arguments = []
    overrides: Arguments = []
    goes_to = own
    for argument in argv:
        if argument.startswith("-") and not _is_number(argument):
            goes_to = overrides if argument.startswith("--") and "." in argument.partition("=")[0] else own
        goes_to.append(argument)
    return own, overrides


def check_output(path: Path, suffixes: tuple[str, ...], overwrite: bool) -> None:
    """Refuse a file that can't be written, before anything is computed.

    Raises:
        ConfigError: it has another suffix, exists, or its folder does not.
    """
    if not path.name.endswith(suffixes):
        raise ConfigError(f"--output {path}: must end in {' or '.join(suffixes)}")
    if path.is_dir():
        raise ConfigError(f"--output {path}: is a folder; name a file in it")
    if path.exists() and not overwrite:
        raise ConfigError(f"--output {path}: exists; choose another name, or pass --overwrite")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--output {path}: there is no folder {path.parent}; make it first")


def _is_number(argument: str) -> bool:
    try:
        float(argument)
    except ValueError:
        return False
    return True
