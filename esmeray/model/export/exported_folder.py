"""The folder of an exported model, whole under its final name or not there: the task by which it is opened
(``esmeray_model.json``), and settings of a model in JSON files with a format version.

Nothing here needs torch, so that damage to a folder is reported at once.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, TypeAdapter

from esmeray.common.errors import DataError, expanded, parsing, read_json
from esmeray.common.publishing import made_folder
from esmeray.common.verification import verified
from esmeray.model.backbones.source import MODEL_FILE
from esmeray.model.section import ClassifierSection
from esmeray.train_config.removed import stored_in

FORMAT_VERSION = 1
REMEDY = "export the model again"
CONFIG_FILE = "classifier_config.json"
WEIGHTS_FILE = "classifier.safetensors"
MADE_BY = "export"
"""Name in the manifest of an exported model, whether a run or the tool made it."""

Settings = TypeVar("Settings")


class ClassifierSettings(BaseModel):
    """classifier_config.json."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    architecture: str
    hidden_size: int
    padded: bool
    num_prefix: int
    num_suffix: int
    classifier: ClassifierSection


@contextmanager
def exported_folder(
    folder: str | Path, task: str, overwrite: bool, resolved_config: str | None
) -> Iterator[tuple[Path, Path]]:
    """A folder to write to, and the absolute path that it gets when the block ends; it is removed when that raises.

    ``task``: by which the model is opened. ``resolved_config``: the run's config as YAML, stored as config.yaml. Raises
    ConfigError (the folder exists and ``overwrite`` is not set, or it is no export or was changed since) or
    ResourceError (the disk is full or not writable; nothing is left behind).
    """
    target = expanded(folder).absolute()
    with made_folder(target, MADE_BY, overwrite) as building:
        yield building, target
        # Written here for every task: without it the folder would be opened as one of transformers.
        write_settings(building / MODEL_FILE, {"task": task})
        if resolved_config is not None:
            (building / "config.yaml").write_text(resolved_config, encoding="utf-8")


def task_of(folder: Path) -> str | None:
    """The task of an exported model; None for a folder of transformers. Raises DataError where a file is damaged."""
    manifest = folder / MODEL_FILE
    if not manifest.is_file():
        return None
    text = TypeAdapter(str)
    return read_settings_of(manifest, "exported model", lambda settings: text.validate_python(settings["task"]))


def read_settings(folder: Path) -> ClassifierSettings:
    """The settings of an exported classifier. Raises DataError (no classifier, another format version, or damage)."""
    return read_settings_of(
        folder / CONFIG_FILE, "classifier", partial(ClassifierSettings.model_validate, context=stored_in(folder))
    )


def write_settings(path: Path, settings: dict[str, Any]) -> None:
    path.write_text(f"{json.dumps({'format_version': FORMAT_VERSION, **settings}, indent=2)}\n", encoding="utf-8")


def read_settings_of(path: Path, holds: str, parse: Callable[[dict[str, Any]], Settings]) -> Settings:
    """Parse the settings, the format version left out.

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
