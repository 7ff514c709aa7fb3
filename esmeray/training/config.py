"""All settings of an experiment, as one typed tree.

The tree checks the YAML file, the command line and the settings recorded in a checkpoint. A function takes the section
that it needs, never the whole tree. Each section is defined in the package that reads it. The string below a setting
describes it and names its unit; the command line's help and docs/config.md are generated from these strings.
"""

from pathlib import Path
from typing import Annotated

from pydantic import model_validator

from esmeray.cluster.section import RaySection
from esmeray.common.errors import expanded
from esmeray.dataset.section import SPECIAL_TOKENS_PER_SEQUENCE, BatchSection, DataSection
from esmeray.monitoring.section import MonitoringSection, WandbSection
from esmeray.run_folder.section import RunSection, StorageSection
from esmeray.tasks.section import ModelSection, TaskSettings
from esmeray.train_config.loading import load_settings
from esmeray.train_config.section import FIXED, UNSEEN, Overrides, Precision, Section
from esmeray.training.section import CheckpointSection, DeepSpeedSection, TrainingSection


class Config(Section):
    """A training run of Esmeray."""

    run: RunSection = RunSection()
    data: DataSection = DataSection()
    batch: Annotated[BatchSection, FIXED] = BatchSection()
    model: Annotated[ModelSection, FIXED] = ModelSection()
    training: TrainingSection = TrainingSection()
    deepspeed: DeepSpeedSection = DeepSpeedSection()
    checkpoint: Annotated[CheckpointSection, UNSEEN] = CheckpointSection()
    storage: Annotated[StorageSection, UNSEEN] = StorageSection()
    ray: Annotated[RaySection, UNSEEN] = RaySection()
    wandb: Annotated[WandbSection, UNSEEN] = WandbSection()
    monitoring: Annotated[MonitoringSection, UNSEEN] = MonitoringSection()

    @model_validator(mode="after")
    def _muon_has_matrices(self) -> "Config":
        if self.training.optimizer == "muon" and self.model.backbone.frozen:
            raise ValueError(
                "training.optimizer muon updates the backbone's weight matrices, but model.backbone.frozen "
                "trains none: set it to adamw"
            )
        return self

    @model_validator(mode="after")
    def _longest_sequence_fits(self) -> "Config":
        needed = self.data.max_length + SPECIAL_TOKENS_PER_SEQUENCE
        if self.batch.tokens < needed:
            raise ValueError(
                f"batch.tokens ({self.batch.tokens}) is too small for one sequence of data.max_length "
                f"({self.data.max_length}) and its {SPECIAL_TOKENS_PER_SEQUENCE} special tokens: raise "
                f"batch.tokens to at least {needed} or lower data.max_length"
            )
        return self

    @property
    def task_settings(self) -> TaskSettings:
        """The settings that the task needs."""
        training = self.training
        return TaskSettings(
            self.data, self.batch, self.model, self.run.seed, training.precision, training.evaluation_batches
        )


def load_config(path: str | Path | None, overrides: Overrides | None = None, *, is_stored: bool = False) -> Config:
    """Read, merge and validate the settings of an experiment. If the path is None, use the defaults.

    ``is_stored``: the file is the one of a run or an export, and may set what was removed since.

    ``train_config/NAME.yaml`` is found from any folder, also as NAME. If the precision is not set, it is chosen once
    the nodes are known: see :func:`with_precision`. Raises ConfigError with one line per problem, which names the file
    and line or the option.
    """
    return load_settings(Config, path, _without_sizes(overrides or {}), is_stored=is_stored)


def with_precision(config: Config, precision: Precision) -> Config:
    """Return the config with this precision, unless it sets a precision itself."""
    if "precision" in config.training.model_fields_set:
        return config
    return config.model_copy(update={"training": config.training.model_copy(update={"precision": precision})})


def _without_sizes(overrides: Overrides) -> Overrides:
    """Drop the file's size of random weights if the command line names trained weights, which have a size of their
    own."""
    source = overrides.get(("model", "backbone", "source"))
    # A name without a slash is a size of random weights, unless a folder has this name.
    if not source or not ("/" in source or expanded(source).is_dir()):
        return overrides
    return {**{("model", "backbone", size): None for size in ("layers", "hidden_size", "heads")}, **overrides}
