"""Folder of an exported model, which appears under its final name only when it is complete.

``esmeray_model.json`` has the task, which determines how the folder is opened. Settings of a model are in JSON files
with a format version. Nothing here needs torch, so that damage to a folder is reported at once.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, TypeAdapter

from esmeray.common.errors import DataError, expanded, parsing, read_json
from esmeray.common.publishing import made_folder, verified
from esmeray.model.backbones.source import MODEL_FILE
from esmeray.model.section import ClassifierSection
from esmeray.train_config.removed import stored_in

FORMAT_VERSION = 1
REMEDY = "export the model again"
CONFIG_FILE = "classifier_config.json"
WEIGHTS_FILE = "classifier.safetensors"
MADE_BY = "export"
"""Name in the manifest of an exported model, both for runs and for the export command."""

Settings = TypeVar("Settings")


class ClassifierSettings(BaseModel):
    """Content of classifier_config.json."""

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
    """Yield a folder to write to, and the absolute path that it gets when the block ends.

    If the block raises, the folder is removed. ``task``: task that opens the model. ``resolved_config``: the run's
    config as YAML, stored as config.yaml.

    Raises ConfigError if the folder exists and ``overwrite`` is not set, or if it is not an export or was changed
    since. Raises ResourceError if the disk is full or not writable; nothing is left behind.
    """
    target = expanded(folder).absolute()
    with made_folder(target, MADE_BY, overwrite) as building:
        yield building, target
        # Written for every task: without this file the folder would be opened as a model of transformers.
        write_settings(building / MODEL_FILE, {"task": task})
        if resolved_config is not None:
            (building / "config.yaml").write_text(resolved_config, encoding="utf-8")


def task_of(folder: Path) -> str | None:
    """Task of an exported model; None for a folder of transformers. Raises DataError if a file is damaged."""
    manifest = folder / MODEL_FILE
    if not manifest.is_file():
        return None
    return read_settings_of(
        manifest, "exported model", lambda settings: TypeAdapter(str).validate_python(settings["task"])
    )


def read_settings(folder: Path) -> ClassifierSettings:
    """Settings of an exported classifier.

    Raises DataError if the folder has no classifier, another format version, or damage.
    """
    return read_settings_of(
        folder / CONFIG_FILE, "classifier", partial(ClassifierSettings.model_validate, context=stored_in(folder))
    )


def write_settings(path: Path, settings: dict[str, Any]) -> None:
    path.write_text(f"{json.dumps({'format_version': FORMAT_VERSION, **settings}, indent=2)}\n", encoding="utf-8")


def read_settings_of(path: Path, holds: str, parse: Callable[[dict[str, Any]], Settings]) -> Settings:
    """Parse the settings without the format version.

    Raises DataError if the file is missing (``holds`` says what the folder should contain) or damaged, or has another
    format version.
    """
    if not path.is_file():
        raise DataError(f"{path.parent} contains no {holds} ({path.name} is missing)")
    settings = read_json(verified(path), REMEDY)
    with parsing(path, REMEDY):
        version = settings.pop("format_version")  # checked first, because names of settings may differ between versions
        if version != FORMAT_VERSION:
            raise DataError(
                f"{path} has format version {version}, but this version of Esmeray reads {FORMAT_VERSION}; {REMEDY}"
            )
        return parse(settings)
