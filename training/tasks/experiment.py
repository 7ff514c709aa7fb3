"""What the training loop is told of a task: its data, its model, and how an evaluation is summed up.

In: the config, the folder of the data. Out: batches, a model, figures. Here for the tasks that learn from residues
alone; :mod:`training.tasks.classifier.experiment` has the one for labels.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dataset.batches.cropping import CropCount
from dataset.batches.loader import TrainingBatches, ValidationBatches
from dataset.batches.splitting import split_records
from dataset.batches.steps import TrainingSteps, ValidationSteps
from dataset.store.reader import Store
from model.tasks.autoencoder import ESM2Autoencoder
from model.tasks.base import TaskModel
from model.tasks.registry import build_model
from run_folder.paths import RunFolder
from train_config.schema import Config
from training.engine.collective import ControlGroup
from training.engine.context import WorkerContext
from training.engine.engine import TrainingEngine
from training.engine.metric_sums import evaluate


class Experiment(ABC):
    """One task on its data, as one worker sees it.

    Attributes:
        batches: steps of training.
        validation: steps of an evaluation.
        cropped: what an epoch crops.
        checksum: identity of the data, which a checkpoint can't be continued without.
        feature_cache_hit_rate: share of the records whose kept features were there when the run began; None where
            none are kept.
    """

    batches: TrainingSteps
    validation: ValidationSteps
    cropped: CropCount
    checksum: str
    feature_cache_hit_rate: float | None = None

    @abstractmethod
    def build_model(self) -> TaskModel:
        """The model to train, in fp32 on the CPU."""

    @abstractmethod
    def record_name(self, record: int) -> str:
        """The id of a record."""

    def open(self, model: TaskModel, context: WorkerContext, control: ControlGroup) -> None:  # noqa: B027
        """Make what batches depend on the model for. Every worker calls it, whenever it starts."""

    def prepare(self, model: TaskModel, context: WorkerContext, control: ControlGroup) -> None:  # noqa: B027
        """Measure what the model needs to know of the data before the first step. Every worker calls it."""

    def names(self) -> dict[str, bytes]:
        """Files that say what the model's inputs and outputs mean, by name; they go into each checkpoint."""
        return {}

    def rate_shares(self, model: TaskModel) -> dict[Any, float]:
        """Share of the learning rate of each parameter; 1 for those that are not named."""
        return {}

    def evaluate(
        self, engine: TrainingEngine, control: ControlGroup, stop_requested: Callable[[], bool]
    ) -> dict[str, float]:
        """Figures of the held-out records; none where there are none or a stop was asked for. Every worker calls it."""
        totals = evaluate(engine, self.validation.steps(), control, stop_requested)
        return engine.module.figures(totals) if totals else {}  # type: ignore[operator]

    def cost(self, figures: dict[str, float]) -> float | None:
        """What says which checkpoint is best: lower is better; None where it is not known."""
        loss = figures.get("loss")
        return loss if loss is not None and math.isfinite(loss) else None

    @property
    def patience(self) -> int | None:
        """Evaluations without a lower cost after which training ends; None for any number."""
        return None

    @property
    def exports_best(self) -> bool:
        """Whether the best checkpoint is what a run gives, and not its last step."""
        return False

    def close(self) -> None:
        """End loader processes."""
        self.batches.close()
        self.validation.close()


class ResidueExperiment(Experiment):
    """The autoencoder or the masked language model on a store of residues."""

    def __init__(self, config: Config, context: WorkerContext, store_path: str) -> None:
        """Open the store.

        Raises:
            DataError: it can't be read.
        """
        self._config = config
        self._store = Store(store_path)
        self.checksum = self._store.checksum
        training, held_out = split_records(self._store.sequence_hashes, config.data.validation_share)
        common: dict[str, Any] = {
            "data": config.data,
            "batch": config.batch,
            "task": config.model.task,
            "masked_lm": config.model.masked_lm,
            "rank": context.rank,
            "world_size": context.world_size,
        }
        batches = TrainingBatches(self._store.path, training, seed=config.run.seed, **common)
        self.batches, self.cropped = batches, batches.cropped
        self.validation = ValidationBatches(
            self._store.path, held_out, max_batches=config.training.evaluation_batches, **common
        )

    def build_model(self) -> TaskModel:
        """See :func:`model.tasks.registry.build_model`."""
        return build_model(self._config.model, self._config.run.seed)

    def record_name(self, record: int) -> str:
        """Its id in the store."""
        return self._store.id(record)

    def prepare(self, model: TaskModel, context: WorkerContext, control: ControlGroup) -> None:
        """Measure the normalisation of the autoencoder's features."""
        if isinstance(model, ESM2Autoencoder):
            model.to(context.device)
            tokens = self._config.model.autoencoder.normalization_tokens
            measure_features(model, self.batches, tokens, context, control)


def measure_features(
    model: ESM2Autoencoder, batches: TrainingSteps, tokens: int, context: WorkerContext, control: ControlGroup
) -> None:
    """Fix the autoencoder's normalisation from the first steps of the first epoch, all workers together."""
    statistics = model.new_statistics()
    seen = 0
    for step in batches.epoch(0):
        for batch in step.batches:
            model.measure(batch.to(context.device), statistics)
        seen += control.agree(0, step.num_tokens, stop=False, failed=False).tokens
        if seen >= tokens:
            break
    sums = control.sum({str(index): tensor for index, tensor in enumerate(statistics.tensors)})
    for index, tensor in enumerate(statistics.tensors):
        tensor.copy_(sums[str(index)])
    model.set_normalization(statistics)


def open_experiment(config: Config, context: WorkerContext, run: RunFolder, data_path: str) -> Experiment:
    """The config's task on the data in this folder.

    Args:
        config: the resolved config.
        context: rank and world size.
        run: the run's folder, which holds a classifier's tokenizer.
        data_path: a store, or for the classifier a labelled store.

    Raises:
        DataError: the data can't be read.
    """
    if config.model.task == "classifier":
        from training.tasks.classifier.experiment import ClassificationExperiment  # here: it loads torchmetrics

        return ClassificationExperiment(config, context, run, Path(data_path))
    return ResidueExperiment(config, context, data_path)
