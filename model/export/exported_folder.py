"""The folder of an exported model, whole under its final name or not there, and a classifier's settings in it.

Nothing here needs torch, so that damage to a folder is reported at once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError

from common.errors import DataError, ResourceError
from common.publishing import made_folder
from model.export.manifest import write_manifest
from train_config.classifier_schema import ClassifierSection

CONFIG_FILE = "classifier_config.json"
WEIGHTS_FILE = "classifier.safetensors"
FORMAT_VERSION = 1
MADE_BY = "export"
"""Name in the manifest of an exported model, whether a run or the tool made it."""


class ClassifierSettings(BaseModel):
    """classifier_config.json."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    format_version: int
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
        write_manifest(building, task)
        if resolved_config is not None:
            (building / "config.yaml").write_text(resolved_config, encoding="utf-8")


def read_settings(folder: Path) -> ClassifierSettings:
    """The settings of an exported classifier.

    Raises DataError (the folder holds no classifier, one of another format version, or a damaged file).
    """
    path = folder / CONFIG_FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        version = content["format_version"]
        if version != FORMAT_VERSION:
            raise DataError(
                f"{path} has format version {version}, this program reads {FORMAT_VERSION}; export the model again"
            )
        return ClassifierSettings.model_validate(content)
    except FileNotFoundError as error:
        raise DataError(f"{folder} holds no classifier ({CONFIG_FILE} is missing)") from error
    except (OSError, ValueError, ValidationError, KeyError, TypeError) as error:
        raise DataError(f"{path} is damaged ({type(error).__name__}); export the model again") from error
