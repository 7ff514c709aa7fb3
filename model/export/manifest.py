"""``esmeray_model.json``: the task of an exported model, by which it is opened. Nothing here needs torch."""

from __future__ import annotations

import json
from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from common.errors import DataError

MODEL_FILE = "esmeray_model.json"
FORMAT_VERSION = 1
_RUN_CONFIG = "config.yaml"


class ModelManifest(BaseModel):
    """``task`` is a name of ``model.task``; what else a task needs stands in files of its own beside this one."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    task: str
    format_version: int = FORMAT_VERSION


def write_manifest(folder: Path, task: str) -> None:
    """Say of which task the model in ``folder`` is."""
    text = ModelManifest(task=task).model_dump_json(indent=2)
    (folder / MODEL_FILE).write_text(text + "\n", encoding="utf-8")


def task_of(folder: Path) -> str | None:
    """The task of an exported model; None for a folder of transformers.

    Exports of earlier versions have no manifest: their task is that of the run's config beside them. Raises DataError
    where a file is damaged or of a later version.
    """
    manifest, config = folder / MODEL_FILE, folder / _RUN_CONFIG
    path = manifest if manifest.is_file() else config
    try:
        if path == manifest:
            content = ModelManifest.model_validate(json.loads(path.read_text(encoding="utf-8")))
        elif config.is_file():
            content = ModelManifest(task=yaml.safe_load(path.read_text(encoding="utf-8"))["model"]["task"])
        else:
            return None
    except (OSError, ValueError, ValidationError, KeyError, TypeError, yaml.YAMLError) as error:
        raise DataError(f"{path} is damaged ({type(error).__name__}); export the model again") from error
    if content.format_version != FORMAT_VERSION:
        raise DataError(
            f"{path} has format version {content.format_version}, this program reads {FORMAT_VERSION}; export the "
            "model again"
        )
    return content.task
