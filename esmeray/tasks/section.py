"""Settings of the model: the sections that tasks share, and each task's own section."""

from typing import TYPE_CHECKING, Any, Literal, NamedTuple

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
    """Create the section with the choice of a task and each task's own settings under its name."""
    tasks = {name: task_named(name) for name in task_names()}
    summaries = "; ".join(f"{name}: {task.summary}" for name, task in tasks.items() if task.summary)
    fields: dict[str, Any] = {name: (task.section, task.section()) for name, task in tasks.items()}
    # Literal of a tuple of strings: the help lists these choices, and typos are checked against them.
    fields["task"] = (Literal[tuple(tasks)], Field("autoencoder", description=f"{summaries}."))
    return create_model(
        "ModelSection", __base__=SharedModelSection, __module__=__name__, __doc__=SharedModelSection.__doc__, **fields
    )


if TYPE_CHECKING:

    class ModelSection(SharedModelSection):
        """Section for type checkers, which know only the shared sections; a task types its own."""

        def __getattr__(self, name: str) -> Any: ...

else:
    ModelSection = _with_tasks()


class TaskSettings(NamedTuple):
    """The settings of an experiment that its task needs.

    Attributes:
        seed: of weights, shuffling, cropping and masking.
        evaluation_batches: packed batches per evaluation, over all workers.
    """

    data: DataSection
    batch: BatchSection
    model: ModelSection
    seed: int
    precision: Precision
    evaluation_batches: int
