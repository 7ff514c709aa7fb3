"""Resolve the models that settings name, and read the models' settings.

A model is a run, an export, or a folder, hub name or size of transformers.

This module does not import torch, so that a wrong name is reported at once.
"""

from pathlib import Path
from typing import NamedTuple

from esmeray.common.errors import ConfigError
from esmeray.common.publishing import verified
from esmeray.dataset.batches.preparation import fixed_crop
from esmeray.dataset.section import DataSection
from esmeray.dataset.targets import LabelSpace
from esmeray.dataset.tokens import model_folder
from esmeray.inference.models.kinds import Limit
from esmeray.model.backbones.source import has_random_weights
from esmeray.model.export.exported_folder import read_settings, task_of
from esmeray.model.section import BackboneSection
from esmeray.train_config.section import Overrides
from esmeray.training.config import Config, load_config


class ModelSource(NamedTuple):
    """A located model.

    Attributes:
        name: the name that was given.
        path: folder, hub name or size.
        task: task that exported it; None for a transformers model.
        random_weights: true for a size, which has no trained weights.
    """

    name: str
    path: str
    task: str | None
    random_weights: bool = False

    @property
    def folder(self) -> Path:
        return Path(self.path).absolute()


def find_model(source: str | Path, key: str = "model") -> ModelSource:
    """Resolve the model that the setting ``key`` names.

    Raises ConfigError for a missing folder or a run without an export, DataError for a damaged manifest.
    """
    source = str(source)
    if has_random_weights(BackboneSection(source=source)):
        return ModelSource(source, source, None, random_weights=True)
    folder = model_folder.local_folder(source, key)
    # Without a folder it is a hub name; its contents are known when transformers opens it.
    if folder is None:
        return ModelSource(source, source, None)
    # A folder with the name of a size, e.g. ./bert, must not resolve to the size, which has random weights.
    path = folder.absolute() if has_random_weights(BackboneSection(source=str(folder))) else folder
    return ModelSource(source, str(path), task_of(folder))


def check_model(source: str | Path, random_weights: bool, key: str = "model") -> ModelSource:
    """Resolve a model and check that it can be opened; random weights only if they are allowed.

    Raises the errors of :func:`find_model`, ConfigError for an unknown name, ResourceError if the hub can't be reached.
    """
    located = find_model(source, key)
    # A size is easily mistaken for trained weights, and embeddings of random weights look like any others.
    if located.random_weights and not random_weights:
        raise ConfigError(
            f"{key} {source}: a model size, not a checkpoint; give a folder or a hub name such as "
            "facebook/esm2_t6_8M_UR50D, or to try it with random weights, set random_weights true"
        )
    if located.task is None and not located.random_weights:  # the manifest of an export has been read already
        model_folder.check_model(located.path, key)
    return located


def exported_by(task: str, source: str | Path, *others: str) -> Path:
    """Folder of the model that a setting names. Raises ConfigError if it is of neither this task nor the ``others``."""
    located = find_model(source)
    if located.task not in (task, *others):
        holds = f"a model of task {located.task}" if located.task else "not an exported model"
        raise ConfigError(
            f"model {source}: {holds}; give a run of model.task {task}, such as runs/NAME, or its export (to "
            "export a run that has not finished: 'esmeray train export RUN')"
        )
    return located.folder


def config_of(folder: Path, overrides: Overrides | None = None) -> Config:
    """Settings that the model in a folder was trained with, plus overrides; the defaults if the folder has none."""
    path = folder / "config.yaml"
    # The checksum is verified, because a flipped digit of a length or a changed column name would be a valid setting.
    return load_config(verified(path) if path.is_file() else None, overrides, is_stored=True)


def limit_of(data: DataSection) -> Limit:
    """Limit of texts to predict, as in training with these settings."""
    return Limit(data.max_length, fixed_crop(data.crop))


def exported_classifier(source: str | Path) -> tuple[Path, LabelSpace]:
    """Folder and label space of the classifier that a setting names, from its files only.

    Raises ConfigError if it is no classifier, DataError for damaged files.
    """
    folder = exported_by("classifier", source)
    read_settings(folder)  # for its checks only: damage is reported before torch is loaded
    return folder, LabelSpace.load(folder)
