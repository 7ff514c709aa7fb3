"""``train_ray.py --help``: every setting with type, unit and default, the defaults from the file where one is named."""

from __future__ import annotations

from pathlib import Path

import tyro

from train_config.loading import load_config
from train_config.schema import Config


def print_help(path: str | Path | None, description: str) -> None:
    """Print all settings, grouped by section."""
    text = description + f"\nDefaults below are {f'those of {path}' if path else 'the built-in ones'}."
    try:
        tyro.cli(
            Config,
            prog="train_ray.py --config FILE",
            description=text,
            default=load_config(path),
            args=["--help"],
            config=(tyro.conf.FlagConversionOff,),
            use_underscores=True,
        )
    except SystemExit as end:
        if end.code:
            raise
