"""``train_ray.py --help``: every setting with type, unit and default; defaults from the files, where they are named."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from train_config.loading import load_config, load_tune_config
from train_config.schema import Config
from train_config.tune_schema import TuneConfig


@dataclass(frozen=True)
class _Search:
    """Gives the options of a search their prefix."""

    tune: TuneConfig


def print_help(path: str | Path | None, description: str, tune_path: str | Path | None = None) -> None:
    """Print all settings, grouped by section; with ``tune_path`` those of the search too."""
    text = description + f"\nDefaults below are {_origin(path)}."
    _print(Config, load_config(path), "train_ray.py --config FILE", text)
    if tune_path is not None:
        text = f"The search. Defaults below are {_origin(tune_path)}."
        _print(_Search, _Search(load_tune_config(tune_path)), "train_ray.py --config FILE --tune FILE", text)


def _origin(path: str | Path | None) -> str:
    return f"those of {path}" if path else "the built-in ones"


def _print(schema: type[Any], default: Any, program: str, text: str) -> None:
    try:
        tyro.cli(
            schema,
            prog=program,
            description=text,
            default=default,
            args=["--help"],
            config=(tyro.conf.FlagConversionOff,),
            use_underscores=True,
        )
    except SystemExit as end:
        if end.code:
            raise
