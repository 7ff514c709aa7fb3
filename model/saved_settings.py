"""Settings of a saved model: a JSON file with a format version. Nothing here needs torch, so refusals come at once."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from esmeray.common.errors import DataError, parsing, read_json
from esmeray.common.verification import verified

FORMAT_VERSION = 1
REMEDY = "export the model again"

Settings = TypeVar("Settings")


def write_settings(path: Path, settings: dict[str, Any]) -> None:
    path.write_text(f"{json.dumps({'format_version': FORMAT_VERSION, **settings}, indent=2)}\n", encoding="utf-8")


def read_settings_of(path: Path, holds: str, parse: Callable[[dict[str, Any]], Settings]) -> Settings:
    """What ``parse`` makes of the settings, the format version left out.

    Raises DataError (the folder does not hold what it should, ``holds``; another format version; damaged).
    """
    if not path.is_file():
        raise DataError(f"{path.parent} holds no {holds} ({path.name} is missing)")
    settings = read_json(verified(path), REMEDY)
    with parsing(path, REMEDY):
        version = settings.pop("format_version")  # first: settings of another version may be named otherwise
        if version != FORMAT_VERSION:
            raise DataError(f"{path} has format version {version}, this program reads {FORMAT_VERSION}; {REMEDY}")
        return parse(settings)
