"""Contact probability of each pair of residues, from the contact head of ESM-2."""

from typing import Any

import torch
from torch import Tensor

from esmeray.inference.models.kinds import OutputKind
from esmeray.inference.models.model import Model
from esmeray.inference.models.packing import ModelInput


def _contacts(model: Model, tokens_T: Tensor, inputs: ModelInput) -> Tensor:
    """(sum of squared lengths, 1) fp32; attention is computed again, one sequence at a time."""
    backbone: Any = model.backbone
    # One sequence at a time, because contacts need the (L, L) attention of all layers, which the packed kernel never
    # forms.
    sequences = tokens_T.split(inputs.batch.cu_seqlens.diff().tolist())
    return torch.cat([backbone.contacts(tokens).reshape(-1, 1) for tokens in sequences])


KIND = OutputKind(
    "probability of contact of each pair of residues, by the contact head of ESM-2; special tokens left out",
    rows=_contacts,
    per="pair",
    reads="tokens",
    # The head reads the attention of all layers, so the first layers of a model have none.
    channels=lambda model: (
        1
        if hasattr(model.backbone.model, "contact_head") and model.backbone.has_final_norm and not model.facts.streamed
        else None
    ),
)
