"""A task, and one on residues, as the training loop sees it: its batches, its model, its evaluation and its export.

The driver's side of a task is :mod:`esmeray.tasks.plan`; :mod:`esmeray.tasks.registry` knows both by
name.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from esmeray.cluster.collective import ControlGroup, MetricSums, WorkerContext
from esmeray.common.errors import CheckpointError
from esmeray.dataset.batches.loader import BatchSource, Indices, ResidueSource
from esmeray.dataset.batches.plan import Groups
from esmeray.dataset.batches.preparation import CropCount, Masking, PreparationSettings, count_cropped
from esmeray.dataset.batches.random_bits import split_records
from esmeray.dataset.batches.steps import TrainingSteps, ValidationSteps
from esmeray.dataset.packed_batch import PackedBatch
from esmeray.dataset.store.format import SEQUENCES_FOLDER
from esmeray.dataset.store.reader import Store, stage_once
from esmeray.model.backbones.loading import residue_tokenizer
from esmeray.model.export.backbone import export
from esmeray.model.task_model import ResidueModel, TaskModel, TaskOutput
from esmeray.run_folder.checkpoints import CheckpointFolder
from esmeray.run_folder.paths import RunFolder
from esmeray.tasks.registry import part_named, task_named
from esmeray.tasks.section import ModelSection, TaskSettings

Model = TypeVar("Model", bound=TaskModel)


@dataclass(frozen=True)
class TrainedState:
    """The weights of a checkpoint, to be exported: those trained, whole and in fp32, by parameter.

    Attributes:
        checkpoint: its settings and names describe the model, as those of the run's folder may be of later data.
        model, seed: of these settings.
        resolved_config: all of them, as YAML.
        facts: run, data, steps and metrics, for the model card.
    """

    weights: Mapping[str, Tensor]
    checkpoint: CheckpointFolder
    run: RunFolder
    model: ModelSection
    seed: int
    resolved_config: str
    facts: dict[str, Any]

    def put_into(self, model: Model) -> Model:
        """Load the weights into a model whose other weights came from its source; CheckpointError for another model."""
        # Not strict: frozen weights are not in the state, but came from the source.
        missing, unexpected = model.load_state_dict(dict(self.weights), strict=False)
        trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        if unexpected or trained & set(missing):
            names = ", ".join([*unexpected, *sorted(trained & set(missing))][:3])
            raise CheckpointError(
                f"{self.run.path}: the trained state does not fit model.* of its config ({names} ...)"
            )
        return model


class Engine(Protocol):
    """Engine that runs the model: DeepSpeed's, or in a test the module alone."""

    @property
    def module(self) -> Any: ...
    @property
    def device(self) -> torch.device: ...
    def __call__(self, batch: PackedBatch) -> TaskOutput:
        """Loss and metric sums of one batch."""


class Experiment(ABC):
    """One task on its data, as one worker sees it.

    Attributes:
        store: the sequences, whose ids name the records.
        batches, validation: see :meth:`take`.
        cropped: what an epoch crops.
        checksum: identity of the data, which a checkpoint can't be resumed without.
        runs_backbone: false where its features are cached.
        patience: evaluations without a lower cost after which training ends; None for any number.
        exports_best: a run exports its best checkpoint in place of its last step.
        names: files that say what the model's inputs and outputs mean, by name; they go into each checkpoint.
    """

    store: Store
    batches: TrainingSteps
    validation: ValidationSteps
    cropped: CropCount
    checksum: str
    runs_backbone = True
    patience: int | None = None
    exports_best = False

    def __init__(self, settings: TaskSettings, context: WorkerContext, run: RunFolder, path: Path) -> None:
        self.settings = settings
        self.names: dict[str, bytes] = {}
        self._context = context
        # First: what is copied is read from the node's own disk from here on.
        if settings.data.stage_dir is not None:
            path = self.stage(path, Path(settings.data.stage_dir))
        self.open_data(path, context, run)

    @abstractmethod
    def open_data(self, path: Path, context: WorkerContext, run: RunFolder) -> None:
        """Open prepared data, staged where it is to be, and :meth:`take` batches; DataError where it can't be read.

        The run has what the plan's ``write_names`` wrote.
        """

    def take(
        self,
        training: BatchSource,
        records: Indices,
        held_out: BatchSource,
        held_out_records: Indices,
        max_batches: int | None = None,
        num_workers: int = 0,
        groups: tuple[Groups | None, Groups | None] = (None, None),
    ) -> None:
        """Train on these records of one source, and evaluate on at most ``max_batches`` of those of the other.

        ``num_workers``: loader processes of training. ``groups``: of the records, and of the held-out ones, where a
        batch is to hold several members.
        """
        context = self._context
        keywords: dict[str, Any] = {
            "batch": self.settings.batch,
            "rank": context.rank,
            "world_size": context.world_size,
            # Compiled code has a graph for each shape; on a CPU filling to one would cost as much as real tokens.
            "fixed_shapes": context.device.type == "cuda",
        }
        self.batches = TrainingSteps(
            training,
            records,
            seed=self.settings.seed,
            num_workers=num_workers,
            prefetch=self.settings.data.prefetch,
            groups=groups[0],
            **keywords,
        )
        self.validation = ValidationSteps(
            held_out, held_out_records, max_batches=max_batches, groups=groups[1], **keywords
        )

    @classmethod
    def stage(cls, path: Path, stage_dir: Path) -> Path:
        """Copy prepared data to this node, once in a process, and return the path to open.

        Of a folder that holds more than a store its sequences alone, whose reader looks for the copy. Raises DataError
        where the data is damaged, ResourceError where the node's disk can't be written.
        """
        sequences = path.absolute() / SEQUENCES_FOLDER
        if not sequences.is_dir():
            return stage_once(path, stage_dir)
        # The rest is mapped where it is, read into memory, or what all workers share.
        stage_once(sequences, stage_dir)
        return path

    @classmethod
    @abstractmethod
    def export(cls, trained: TrainedState, folder: Path, *, overwrite: bool) -> Path:
        """Write a Hugging Face folder of a trained model. Needs no data, so a run can be exported anywhere.

        Raises ConfigError where the folder may not be overwritten, CheckpointError where the weights do not fit.
        """

    @abstractmethod
    def build_model(self) -> TaskModel:
        """The model to train, in fp32 on the CPU."""

    def open(self, model: TaskModel, context: WorkerContext, control: ControlGroup) -> None:  # noqa: B027
        """Make what batches depend on the model for. Every worker calls it, whenever it starts."""

    def prepare(  # noqa: B027 - most models need to know nothing
        self, model: TaskModel, context: WorkerContext, control: ControlGroup, *, brief: bool = False
    ) -> None:
        """Measure what the model needs to know of the data before the first step. Every worker calls it.

        ``brief``: as fast as can be, for timings, which do not depend on the values.
        """

    def rate_shares(self, model: TaskModel) -> dict[Any, float]:
        """Share of the learning rate of each parameter; 1 for those that are not named."""
        return {}

    def evaluate(self, engine: Engine, control: ControlGroup, stop_requested: Callable[[], bool]) -> dict[str, float]:
        """Metrics of the held-out records; none where there are none or a stop was asked for. Every worker calls it."""
        totals = self.held_out_sums(engine, control, stop_requested, engine)
        return engine.module.metrics(totals) if totals else {}

    @torch.no_grad()
    def held_out_sums(
        self,
        engine: Engine,
        control: ControlGroup,
        stop_requested: Callable[[], bool],
        forward: Callable[[PackedBatch], TaskOutput],
    ) -> dict[str, Tensor]:
        """Metric sums of ``forward`` over the held-out batches, of which each worker takes some; none as above."""
        engine.module.eval()
        sums = MetricSums()
        stopped = False
        for batches in self.validation.steps():
            # All together: a worker that left alone would keep the others waiting.
            stopped = control.agree(0, 0, stop=stop_requested(), failed=False).stop
            if stopped:
                break
            for batch in batches:
                sums.add(forward(batch.to(engine.device, non_blocking=True)).metrics)
        engine.module.train()
        # Metrics of some of the records would be compared with those of all.
        return {} if stopped else control.sum(sums.own)

    def cost(self, metrics: dict[str, float]) -> float | None:
        """The cost that ranks checkpoints, lower being better; None where it is not known."""
        loss = metrics.get("loss")
        # A NaN would be neither better nor worse than any other, and could stay the best.
        return loss if loss is not None and math.isfinite(loss) else None

    @property
    def cache_hit_rate(self) -> float | None:
        """Share of the cached features, or predicted structures, that were there when they were needed."""
        return None

    def close(self) -> None:
        self.batches.loader.close()


def experiment_class(model: ModelSection) -> type[Experiment]:
    """Return the workers' side of the task that the model is of."""
    experiment = part_named(task_named(model.task).experiment)
    # A task with several experiments names the function that chooses one.
    return experiment if isinstance(experiment, type) else experiment(model)


class ResidueExperiment(Experiment):
    """A task on the residues of a store alone."""

    def masking(self) -> Masking | None:
        """Shares of residues that are hidden, which then are the targets; None where every residue is one."""
        return None

    def open_data(self, path: Path, context: WorkerContext, run: RunFolder) -> None:
        self.store = store = Store(path)
        self.checksum = store.checksum
        training, held_out = split_records(store.sequence_hashes, self.settings.data.validation_share)
        length = self.settings.data.max_length
        masking = self.masking()
        source = ResidueSource(
            store, PreparationSettings(length, self.settings.seed, random_crops=True, masking=masking)
        )
        # Held-out batches depend on no run's seed, so that metrics of runs compare.
        fixed = ResidueSource(store, PreparationSettings(length, 0, random_crops=False, masking=masking))
        self.cropped = count_cropped(store.lengths[training], length)
        self.take(source, training, fixed, held_out, self.settings.evaluation_batches, self.settings.data.num_workers)

    @staticmethod
    @abstractmethod
    def new_model(section: ModelSection, seed: int, *, empty: bool = False) -> ResidueModel:
        """Return the model to train, in fp32 on the CPU; ``empty``: on the meta device, to be counted."""

    @classmethod
    def export(cls, trained: TrainedState, folder: Path, *, overwrite: bool) -> Path:
        return exported(cls.new_model(trained.model, trained.seed), trained, folder, overwrite=overwrite)

    def build_model(self) -> ResidueModel:
        return self.new_model(self.settings.model, self.settings.seed)


def exported(model: ResidueModel, trained: TrainedState, folder: Path, *, overwrite: bool) -> Path:
    """Put the weights of a checkpoint into the model of its config and export it; see :meth:`Experiment.export`."""
    return export(
        trained.put_into(model),
        folder,
        residue_tokenizer(trained.model.backbone),
        resolved_config=trained.resolved_config,
        model_card_facts=trained.facts,
        overwrite=overwrite,
    )
