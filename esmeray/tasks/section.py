"""Settings of the model, assembled from those that tasks share and from each task's own."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, create_model

from esmeray.dataset.section import BatchSection, DataSection, TokenizerSection
from esmeray.model.section import BackboneSection, ClassifierSection
from esmeray.tasks.registry import task_named, task_names
from esmeray.train_config.section import Precision, Section


class SharedModelSection(Section):
    """The model."""

    task: str = "autoencoder"
    backbone: BackboneSection = BackboneSection()
    tokenizer: TokenizerSection = TokenizerSection()
    classifier: ClassifierSection = ClassifierSection()


def _with_tasks() -> Any:
    """The section with the choice of a task, and with each task's own settings below its name."""
    tasks = {name: task_named(name) for name in task_names()}
    summaries = "; ".join(f"{name}: {task.summary}" for name, task in tasks.items() if task.summary)
    fields: dict[str, Any] = {name: (task.section, task.section()) for name, task in tasks.items()}
    # A tuple of strings, of which Literal makes the choices that the help shows and a typo is held against.
    fields["task"] = (Literal[tuple(tasks)], Field("autoencoder", description=f"{summaries}."))
    return create_model(
        "ModelSection", __base__=SharedModelSection, __module__=__name__, __doc__=SharedModelSection.__doc__, **fields
    )


if TYPE_CHECKING:

    class ModelSection(SharedModelSection):
        """A type checker knows the sections that tasks share; a task gives its own their types."""

        def __getattr__(self, name: str) -> Any: ...

else:
    ModelSection = _with_tasks()


@dataclass(frozen=True)
class TaskSettings:
    """An experiment's settings that its task takes.

    Attributes:
        seed: of weights, shuffling, cropping and masking.
        evaluation_batches: packed batches, over all workers, that an evaluation looks at.
    """

    data: DataSection
    batch: BatchSection
    model: ModelSection
    seed: int
    precision: Precision
    evaluation_batches: int
