"""The folder of an exported model, whole under its final name or not there: the task by which it is opened
(``esmeray_model.json``), and a classifier's settings.

Nothing here needs torch, so that damage to a folder is reported at once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError

from common.errors import DataError, ResourceError
from common.publishing import made_folder
from train_config.classifier_schema import ClassifierSection

MODEL_FILE = "esmeray_model.json"
CONFIG_FILE = "classifier_config.json"
WEIGHTS_FILE = "classifier.safetensors"
FORMAT_VERSION = 1
_RUN_CONFIG = "config.yaml"
MADE_BY = "export"
"""Name in the manifest of an exported model, whether a run or the tool made it."""


class _Versioned(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    format_version: int = FORMAT_VERSION

    def write(self, path: Path) -> None:
        path.write_text(self.model_dump_json(indent=2) + "\n", encoding="utf-8")


_Content = TypeVar("_Content", bound=_Versioned)


class ModelManifest(_Versioned):
    """``task`` is a name of ``model.task``; what else a task needs stands in files of its own beside this one."""

    task: str


class ClassifierSettings(_Versioned):
    """classifier_config.json."""

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
    """A folder to write to, which gets its name when the block ends and is removed when it raises.

    ``task``: that the model is of, by which it is opened. ``resolved_config``: the run's config as YAML, stored as
    config.yaml. Yields the folder to write to, and the absolute path that it gets. Raises ConfigError (the folder
    exists and ``overwrite`` is not set, or it is no export or was changed since) or ResourceError (the disk is full or
    not writable; nothing is left behind).
    """
    target = Path(folder).expanduser().absolute()
    with made_folder(target, MADE_BY, overwrite) as building:
        try:
            yield building, target
        except SafetensorError as error:
            raise ResourceError(
                f"the model can't be exported to {target} ({error}); free space or choose another folder"
            ) from error
        ModelManifest(task=task).write(building / MODEL_FILE)
        if resolved_config is not None:
            (building / _RUN_CONFIG).write_text(resolved_config, encoding="utf-8")


def task_of(folder: Path) -> str | None:
    """The task of an exported model; None for a folder of transformers.

    Exports of earlier versions have no manifest: their task is that of the run's config beside them. Raises DataError
    where a file is damaged or of a later version.
    """
    manifest, config = folder / MODEL_FILE, folder / _RUN_CONFIG
    if manifest.is_file():
        return _read(manifest, ModelManifest).task
    if not config.is_file():
        return None
    try:
        return str(yaml.safe_load(config.read_text(encoding="utf-8"))["model"]["task"])
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError) as error:
        raise _damaged(config, error) from error


def read_settings(folder: Path) -> ClassifierSettings:
    """The settings of an exported classifier.

    Raises DataError (the folder holds no classifier, one of another format version, or a damaged file).
    """
    return _read(folder / CONFIG_FILE, ClassifierSettings)


def _read(path: Path, schema: type[_Content]) -> _Content:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        version = content["format_version"]
        if version != FORMAT_VERSION:
            raise DataError(
                f"{path} has format version {version}, this program reads {FORMAT_VERSION}; export the model again"
            )
        return schema.model_validate(content)
    except FileNotFoundError as error:
        raise DataError(f"{path.parent} holds no classifier ({path.name} is missing)") from error
    except (OSError, ValueError, ValidationError, KeyError, TypeError) as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> DataError:
    return DataError(f"{path} is damaged ({type(error).__name__}); export the model again")
