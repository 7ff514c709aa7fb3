"""The folder of a network on vectors: a classifier's, without backbone and tokenizer."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from esmeray.dataset.labels.label_space import LabelSpace
from esmeray.model.export.exported_folder import WEIGHTS_FILE, exported_folder, read_settings
from esmeray.model.export.model_card import model_card
from esmeray.tasks.classifier.export import write_head
from esmeray.tasks.terms.model import VectorClassifier


def export_vector_classifier(
    model: VectorClassifier, folder: Path, resolved_config: str, facts: Mapping[str, Any], overwrite: bool
) -> Path:
    """Write the folder of a network on vectors; raises as the classifier's export."""
    with exported_folder(folder, "terms", overwrite, resolved_config) as (building, target):
        write_head(model, building, "vectors", hidden_size=model.channels, padded=False, num_prefix=0, num_suffix=0)
        description = f"Logits of {model.label_space.num_outputs} terms from a vector of {model.channels}."
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
