"""Masked language modelling: predict the hidden residues of a batch (Devlin et al. 2019; ESM-2, Lin et al. 2023).

The head is the one of the architecture's masked language model in transformers. It is evaluated only at the targets: at
15 % masking this saves 85 % of the head and of the logits.

Shape legend: T tokens in the batch, M tokens with a target, D channels, K tokens of the backbone's vocabulary.
"""

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from esmeray.common.errors import ConfigError
from esmeray.dataset.packed_batch import PackedBatch
from esmeray.model.backbones.base import PackedBackbone
from esmeray.model.backbones.loading import drawn, residue_masked_lm
from esmeray.model.backbones.lora import adapt
from esmeray.model.task_model import Card, ResidueModel, TaskOutput, scalar_sums
from esmeray.tasks.section import ModelSection

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class MaskedLM(ResidueModel):
    """A masked language model on packed batches.

    With a frozen backbone only the head is trained; output weights tied to the embeddings stay frozen. With LoRA only
    the adapters are trained.
    """

    task = "masked_lm"

    def __init__(self, backbone: PackedBackbone, lm_head: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        self.lm_head = lm_head

    @classmethod
    def build(cls, section: ModelSection, seed: int, *, empty: bool = False) -> "MaskedLM":
        """Build the model to train, in fp32 on the CPU. Raises as
        :func:`esmeray.model.backbones.loading.build_masked_lm` and :func:`esmeray.model.backbones.lora.adapt`.

        Random weights depend on ``seed`` only; the global random state is not changed. ``empty``: on the meta device,
        without weights, to count parameters before any weights are read.
        """
        backbone, head = residue_masked_lm(section.backbone, seed, empty=empty)
        if section.backbone.lora.rank:
            if head.is_drawn:
                raise ConfigError(
                    f"model.backbone.lora.rank: {section.backbone.source} has no weights for the masked language "
                    "model's head, and LoRA trains only adapters; set rank 0 to train the whole model"
                )
            head.requires_grad_(False)
        with drawn(seed + 1, empty=empty):  # a different random stream than the backbone's
            adapt(backbone, section.backbone.lora)
        return cls(backbone, head).train()

    def forward(self, batch: PackedBatch) -> TaskOutput:
        """Compute the cross entropy, summed over the targets. Metrics: ``targets``, ``loss`` and ``correct``."""
        features_TD = self.backbone(batch)
        positions_M, targets_M = hidden_residues(self.backbone, batch)
        # Select the targets before the head. Cast to fp32 after it, since a softmax over bf16 logits has two digits.
        logits_MK = self.lm_head(features_TD.index_select(0, positions_M)).float()
        losses_M = functional.cross_entropy(logits_MK, targets_M, reduction="none")
        return TaskOutput(losses_M.sum(), *residue_sums(losses_M, logits_MK, targets_M))

    def network(self) -> "PreTrainedModel":
        from esmeray.model.backbones.huggingface_loading import masked_lm_network

        return masked_lm_network(self.backbone, self.lm_head)

    def card(self, family: str, size: str, network_code: Callable[[str, str], str]) -> Card:
        description = (
            f"# {family} masked language model\n\n{family} with {size}, which predicts masked residues of proteins.\n"
        )
        return Card("fill-mask", ("masked-lm",), description, network_code("logits", "logits"))

    def metrics(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        """Return ``loss`` and ``perplexity`` per masked residue, and ``residue_recovery``, the share predicted
        correctly."""
        return residue_metrics(scalar_sums(sums))


def hidden_residues(backbone: PackedBackbone, batch: PackedBatch) -> tuple[Tensor, Tensor]:
    """Return the positions (M,) of the targets in the batch, and their ids in the backbone's own vocabulary."""
    positions_M = batch.find_targets()
    targets_M = batch.targets.index_select(0, positions_M)
    return positions_M, targets_M if backbone.residue_ids is None else backbone.residue_ids[targets_M]


def residue_sums(losses_M: Tensor, logits_MK: Tensor, targets_M: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the number of targets, and the sums ``targets``, ``loss`` and ``correct``."""
    num_targets = torch.full((), targets_M.numel(), device=losses_M.device)  # torch.tensor would sync with the GPU
    return num_targets, {
        "targets": num_targets.double(),
        "loss": losses_M.detach().sum(dtype=torch.float64),
        "correct": (logits_MK.argmax(-1) == targets_M).sum().double(),
    }


def residue_metrics(values: Mapping[str, float]) -> dict[str, float]:
    """Compute metrics of predicted residues from the sums ``targets``, ``loss`` and ``correct``; empty without
    targets."""
    count = values["targets"]
    if count == 0:  # only fillers were evaluated, on a worker or on all
        return {}
    loss = values["loss"] / count
    perplexity = math.exp(loss) if loss < 700 else math.inf  # exp overflows for larger losses, in a diverging run
    return {"loss": loss, "perplexity": perplexity, "residue_recovery": values["correct"] / count}
