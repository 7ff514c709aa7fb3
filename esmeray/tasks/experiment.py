"""The worker's side of a task: batches, model, evaluation and export, with a base class for tasks on residues.

The driver's side is :mod:`esmeray.tasks.plan`; :mod:`esmeray.tasks.registry` finds both by name.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

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


class TrainedState(NamedTuple):
    """The trained weights of a checkpoint, ready to export: whole and in fp32, by parameter name.

    Attributes:
        checkpoint: its settings and names describe the model. Those in the run's folder may belong to later data.
        model, seed: from the checkpoint's settings.
        resolved_config: all of its settings, as YAML.
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
        """Load the weights into a model whose other weights came from its source. Raises CheckpointError if they don't
        fit."""
        # Not strict: frozen weights are not in the state; the model loaded them from its source.
        missing, unexpected = model.load_state_dict(dict(self.weights), strict=False)
        trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        if unexpected or trained & set(missing):
            names = ", ".join([*unexpected, *sorted(trained & set(missing))][:3])
            raise CheckpointError(f"{self.run.path}: the checkpoint does not match model.* of its config ({names} ...)")
        return model


class RecordSet(NamedTuple):
    """Records of a source to train or evaluate on.

    ``groups``: the group of each record, if a batch is to contain several members of a group.
    """

    source: BatchSource
    records: Indices
    groups: Groups | None = None


class Engine(Protocol):
    """Callable that runs the model: the DeepSpeed engine, or in tests the module alone."""

    @property
    def module(self) -> Any: ...
    @property
    def device(self) -> torch.device: ...
    def __call__(self, batch: PackedBatch) -> TaskOutput:
        """Return the loss and metric sums of one batch."""


class Experiment(ABC):
    """One task on its data, as seen by one worker.

    Attributes:
        store: the sequences; their ids name the records.
        batches, validation: see :meth:`set_batches`.
        cropped: sequences and residues that an epoch crops.
        checksum: identity of the data; a checkpoint resumes only with the same data.
        runs_backbone: false if the features of the backbone are cached.
        patience: evaluations without a lower cost after which training ends; None for no limit.
        exports_best: a run exports its best checkpoint instead of its last step.
        names: files by name that describe the model's inputs and outputs; each checkpoint contains them.
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
        # First: everything below reads the copy on the node's own disk.
        if settings.data.stage_dir is not None:
            path = self.stage(path, Path(settings.data.stage_dir))
        self.open_data(path, context, run)

    @abstractmethod
    def open_data(self, path: Path, context: WorkerContext, run: RunFolder) -> None:
        """Open prepared data (staged, if set) and :meth:`set_batches`. Raises DataError if the data can't be read.

        The run's folder contains the files that the plan's ``write_names`` wrote.
        """

    def set_batches(
        self, training: RecordSet, held_out: RecordSet, *, max_batches: int | None = None, num_workers: int = 0
    ) -> None:
        """Set the batches of training and evaluation.

        ``max_batches``: maximum number of batches per evaluation. ``num_workers``: loader processes of training.
        """
        context = self._context
        keywords: dict[str, Any] = {
            "batch": self.settings.batch,
            "rank": context.rank,
            "world_size": context.world_size,
            # Compiled code has a graph per shape. On a CPU, padding to fixed shapes would cost as much as real tokens.
            "fixed_shapes": context.device.type == "cuda",
        }
        self.batches = TrainingSteps(
            training.source,
            training.records,
            seed=self.settings.seed,
            num_workers=num_workers,
            groups=training.groups,
            **keywords,
        )
        self.validation = ValidationSteps(
            held_out.source, held_out.records, max_batches=max_batches, groups=held_out.groups, **keywords
        )

    @classmethod
    def stage(cls, path: Path, stage_dir: Path) -> Path:
        """Copy prepared data to this node, once per process, and return the path to open.

        If the folder contains more than a store, only its sequences are copied; their reader finds the copy. Raises
        DataError if the data is damaged, and ResourceError if the node's disk can't be written.
        """
        sequences = path.absolute() / SEQUENCES_FOLDER
        if not sequences.is_dir():
            return stage_once(path, stage_dir)
        # The other files are memory-mapped in place, read into memory, or shared by all workers.
        stage_once(sequences, stage_dir)
        return path

    @classmethod
    @abstractmethod
    def export(cls, trained: TrainedState, folder: Path, *, overwrite: bool) -> Path:
        """Write a Hugging Face folder of a trained model. Needs no data, so a run can be exported anywhere.

        Raises ConfigError if the folder must not be overwritten, and CheckpointError if the weights don't fit.
        """

    @abstractmethod
    def build_model(self) -> TaskModel:
        """Return the model to train, in fp32 on the CPU."""

    def open(self, model: TaskModel, context: WorkerContext, control: ControlGroup) -> None:  # noqa: B027
        """Compute data that batches need from the model. Every worker calls it at each start."""

    def prepare(  # noqa: B027 - most models need no statistics
        self, model: TaskModel, context: WorkerContext, control: ControlGroup, *, brief: bool = False
    ) -> None:
        """Measure statistics of the data that the model needs before the first step. Every worker calls it.

        ``brief``: as fast as possible, for timings, which do not depend on the values.
        """

    def rate_shares(self, model: TaskModel) -> dict[Any, float]:
        """Return multiples of the learning rate by parameter; 1 for parameters that are not in it."""
        return {}

    def evaluate(self, engine: Engine, control: ControlGroup, stop_requested: Callable[[], bool]) -> dict[str, float]:
        """Return metrics of the held-out records; empty without records or if a stop was requested. Every worker calls
        it."""
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
        """Return metric sums of ``forward`` over the held-out batches, divided among the workers; empty as in
        evaluate."""
        engine.module.eval()
        sums = MetricSums()
        stopped = False
        for batches in self.validation.steps():
            # Decide together: if one worker ended alone, the others would wait for it.
            stopped = control.agree(0, 0, stop=stop_requested(), failed=False).stop
            if stopped:
                break
            for batch in batches:
                sums.add(forward(batch.to(engine.device, non_blocking=True)).metrics)
        engine.module.train()
        # Metrics of only some records would be compared with metrics of all.
        return {} if stopped else control.sum(sums.own)

    def cost(self, metrics: dict[str, float]) -> float | None:
        """Return the cost that ranks checkpoints, lower is better; None if it is unknown."""
        loss = metrics.get("loss")
        # A NaN compares neither lower nor higher, and could stay the best forever.
        return loss if loss is not None and math.isfinite(loss) else None

    @property
    def cache_hit_rate(self) -> float | None:
        """Share of the cached features, or of the predicted structures, that were available when needed."""
        return None

    def close(self) -> None:
        self.batches.loader.close()


def experiment_class(model: ModelSection) -> type[Experiment]:
    """Return the experiment class of the model's task."""
    experiment = part_named(task_named(model.task).experiment)
    # A task with several experiments names a function that chooses one.
    return experiment if isinstance(experiment, type) else experiment(model)


class ResidueExperiment(Experiment):
    """A task that needs only the residues of a store."""

    def masking(self) -> Masking | None:
        """Return the shares of residues that are masked and become the targets; None if every residue is a target."""
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
        # Held-out batches don't depend on the run's seed, so that metrics of different runs are comparable.
        fixed = ResidueSource(store, PreparationSettings(length, 0, random_crops=False, masking=masking))
        self.cropped = count_cropped(store.lengths[training], length)
        self.set_batches(
            RecordSet(source, training),
            RecordSet(fixed, held_out),
            max_batches=self.settings.evaluation_batches,
            num_workers=self.settings.data.num_workers,
        )

    @staticmethod
    @abstractmethod
    def new_model(section: ModelSection, seed: int, *, empty: bool = False) -> ResidueModel:
        """Return the model to train, in fp32 on the CPU; ``empty``: on the meta device, to count its parameters."""

    @classmethod
    def export(cls, trained: TrainedState, folder: Path, *, overwrite: bool) -> Path:
        return exported(cls.new_model(trained.model, trained.seed), trained, folder, overwrite=overwrite)

    def build_model(self) -> ResidueModel:
        return self.new_model(self.settings.model, self.settings.seed)


def exported(model: ResidueModel, trained: TrainedState, folder: Path, *, overwrite: bool) -> Path:
    """Load the weights of a checkpoint into the model of its config and export it; see :meth:`Experiment.export`."""
    return export(
        trained.put_into(model),
        folder,
        residue_tokenizer(trained.model.backbone),
        resolved_config=trained.resolved_config,
        model_card_facts=trained.facts,
        overwrite=overwrite,
    )
