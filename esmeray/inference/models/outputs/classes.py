"""Probabilities or values of a classifier, per text or residue."""

from torch import Tensor

from esmeray.inference.models.kinds import OutputKind
from esmeray.inference.models.model import Model
from esmeray.inference.models.packing import ModelInput
from esmeray.model.heads.losses import probabilities


def _probabilities(model: Model, tokens_T: Tensor, inputs: ModelInput) -> Tensor:
    """(N, K) fp32, or (R, K) if the classifier is ``per_residue``."""
    classifier = model.heads["classifier"]
    # The classifier runs its own backbone, because pooling is part of its head.
    logits: Tensor = classifier.logits(inputs.batch)
    rows = logits[inputs.residues] if classifier.per_residue else logits
    return probabilities(rows.float(), classifier.label_space.kind)


KIND = OutputKind(
    "probability of each class; special tokens left out",
    rows=_probabilities,
    per=lambda model: "residue" if model.heads["classifier"].per_residue else "protein",
    reads="tokens",
    head="classifier",
    predicts=True,
    channels=lambda model: model.heads["classifier"].label_space.num_outputs,
)
