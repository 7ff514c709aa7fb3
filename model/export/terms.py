"""A trained network on vectors as a folder: weights, settings, names of the terms, model card; nothing is pickled."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.errors import DataError
from dataset.labels.label_space import LabelSpace
from dataset.tokens.base import SequenceTokenizer
from model.export.exported_folder import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    ClassifierSettings,
    exported_folder,
    read_settings,
)
from model.export.model_card import model_card
from model.saved_settings import write_settings
from model.tasks.base import TaskModel
from model.tasks.terms import VectorClassifier

ARCHITECTURE = "vectors"
"""Name in the settings of an export that has no backbone."""


def export_vector_classifier(
    model: VectorClassifier, folder: Path, resolved_config: str, facts: Mapping[str, Any], overwrite: bool
) -> Path:
    """Write the folder; raises as :func:`model.export.classifier.export_classifier`."""
    with exported_folder(folder, "terms", overwrite, resolved_config) as (building, target):
        model.save_own_weights(building / WEIGHTS_FILE)
        settings = ClassifierSettings(
            architecture=ARCHITECTURE,
            hidden_size=model.backbone.hidden_size,
            padded=False,
            num_prefix=0,
            num_suffix=0,
            classifier=model.section,
        )
        write_settings(building / CONFIG_FILE, settings.model_dump(mode="json"))
        model.label_space.save(building)
        description = f"Logits of {model.label_space.num_outputs} terms from a vector of {model.backbone.hidden_size}."
        opening = "`esmeray function predict` takes the folder of its run."
        card = model_card("text-classification", ["protein"], description, facts, opening)
        (building / "README.md").write_text(card, encoding="utf-8")
    return target


def load_vector_classifier(folder: Path) -> VectorClassifier:
    """The model of :func:`export_vector_classifier`, in fp32 on the CPU, in evaluation mode. Raises DataError."""
    settings = read_settings(folder)
    model = VectorClassifier(settings.hidden_size, settings.classifier, LabelSpace.load(folder))
    model.load_own_weights(folder / WEIGHTS_FILE)
    return model.eval()


def refuse_sequences(folder: Path) -> tuple[TaskModel, SequenceTokenizer]:
    """Raise DataError: the model takes vectors."""
    raise DataError(f"{folder}: a network on vectors gives no outputs of sequences; see 'esmeray function predict'")
