"""Terms of proteins from one vector each: the classifier's head and loss without a backbone.

Batches have no tokens, but a vector (C,) per sequence as its features. Vectors are standardized by mean and standard
deviation of the training proteins, which are part of the state. The export is a classifier's folder without backbone
and tokenizer.

Shape legend: N sequences, C channels, K terms.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from esmeray.common.errors import DataError
from esmeray.dataset.labels.label_space import LabelSpace
from esmeray.dataset.packed_batch import FEATURES, PackedBatch
from esmeray.model.backbones.loading import drawn
from esmeray.model.export.exported_folder import WEIGHTS_FILE, exported_folder, read_settings
from esmeray.model.export.model_card import model_card
from esmeray.model.heads.normalization import Normalization
from esmeray.model.section import ClassifierSection
from esmeray.tasks.classifier.export import write_head
from esmeray.tasks.classifier.model import LabelModel


class VectorClassifier(LabelModel):
    """The head of a classifier on vectors.

    ``scale``: (C,) means and (C,) standard deviations of the training vectors; None for 0 and 1, which loading
    replaces.
    """

    def __init__(
        self,
        channels: int,
        section: ClassifierSection,
        label_space: LabelSpace,
        scale: tuple[Tensor, Tensor] | None = None,
        label_weights: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.backbone = None
        self.channels = channels
        self.add_head(section, label_space, channels, label_weights=label_weights)
        self.input_scale = Normalization(channels, *(scale or ()))
        self.head.dropout.p = 0.0  # type: ignore[union-attr, assignment]  # no dropout on the input vectors

    def logits(self, batch: PackedBatch) -> Tensor:
        return self.head(self.input_scale(batch.by_sequence[FEATURES]))


def refuse_sequences(folder: Path) -> NoReturn:
    """Raise DataError: an export of this task takes vectors."""
    raise DataError(f"{folder}: a network on vectors has no outputs for sequences; use 'esmeray function predict'")


def new_vector_classifier(
    section: ClassifierSection,
    seed: int,
    label_space: LabelSpace,
    vectors_NC: Tensor,
    share_K: Tensor,
    label_weights: Tensor,
) -> VectorClassifier:
    """Create the network to train. At first it predicts each term's share (K,) among the training proteins (N, C)."""
    scale = vectors_NC.mean(0), vectors_NC.std(0, correction=0).clamp(min=1e-6)
    with drawn(seed + 1):
        model = VectorClassifier(vectors_NC.shape[1], section, label_space, scale, label_weights)
    output: Any = model.head.output
    # Start at the terms' frequencies. Otherwise thousands of rare terms start at 0.5 and must be unlearnt first.
    nn.init.zeros_(output.weight)
    with torch.no_grad():
        output.bias.copy_(torch.logit(share_K))
    return model.train()


def export_vector_classifier(
    model: VectorClassifier, folder: Path, resolved_config: str, facts: Mapping[str, Any], overwrite: bool
) -> Path:
    """Write the folder of a network on vectors. Raises as the classifier's export."""
    with exported_folder(folder, "terms", overwrite, resolved_config) as (building, target):
        write_head(model, building, "vectors", hidden_size=model.channels, padded=False, num_prefix=0, num_suffix=0)
        description = f"Logits of {model.label_space.num_outputs} terms from a vector with {model.channels} channels."
        opening = "To use it, give the folder of its run to `esmeray function predict`."
        card = model_card("text-classification", ["protein"], description, facts, opening)
        (building / "README.md").write_text(card, encoding="utf-8")
    return target


def load_vector_classifier(folder: Path) -> VectorClassifier:
    """Load a model of :func:`export_vector_classifier`, in fp32 on the CPU, in evaluation mode. Raises DataError."""
    settings = read_settings(folder)
    model = VectorClassifier(settings.hidden_size, settings.classifier, LabelSpace.load(folder))
    return model.load_own_weights(folder / WEIGHTS_FILE).eval()
