"""Settings of a saved model: a JSON file with a format version. Nothing here needs torch, so refusals come at once."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from common.errors import DataError

FORMAT_VERSION = 1

Settings = TypeVar("Settings")


def write_settings(path: Path, settings: dict[str, Any]) -> None:
    text = json.dumps({"format_version": FORMAT_VERSION, **settings}, indent=2)
    path.write_text(text + "\n", encoding="utf-8")


def read_settings_of(path: Path, holds: str, parse: Callable[[dict[str, Any]], Settings]) -> Settings:
    """What ``parse`` makes of the settings, the format version left out.

    Raises DataError (the folder does not hold what it should, ``holds``; another format version; damaged).
    """
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
        version = settings.pop("format_version")
        if version != FORMAT_VERSION:
            raise DataError(
                f"{path} has format version {version}, this program reads {FORMAT_VERSION}; export the model again"
            )
        return parse(settings)
    except FileNotFoundError as error:
        raise DataError(f"{path.parent} holds no {holds} ({path.name} is missing)") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise damaged(path, error) from error


def damaged(path: Path, error: Exception) -> DataError:
    return DataError(f"{path} is damaged ({type(error).__name__}); export the model again")
