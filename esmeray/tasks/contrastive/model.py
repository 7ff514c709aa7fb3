"""Supervised contrastive learning: a sequence's vector is close to those in its groups and far from all others.

The vector is the mean over a sequence's residues; ``embed`` computes it from the export as output ``mean``. The loss is
equation 2 of Khosla et al. 2020 (Supervised contrastive learning). Two sequences are weighted by the closest level at
which they share a group.

The loss relates all sequences of a step, while a batch holds only a part. Therefore all vectors are computed first,
without gradients, and each batch then gets the gradient of the loss by its own vectors (Gao et al. 2021, "Scaling deep
contrastive learning batch size under memory limited setup"). The memory use equals a single batch's.

Shape legend: N sequences, D channels, M maximum number of labels of a sequence, L levels.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from esmeray.dataset.packed_batch import PackedBatch
from esmeray.model.backbones.base import Float32Buffers, PackedBackbone
from esmeray.model.backbones.loading import drawn, residue_backbone
from esmeray.model.backbones.lora import adapt, merge
from esmeray.model.heads.pooling import mean_over_residues
from esmeray.model.task_model import Card, ResidueModel, StepModel, TaskOutput, scalar_sums
from esmeray.tasks.contrastive.section import ContrastiveSection
from esmeray.tasks.section import ModelSection

if TYPE_CHECKING:
    from transformers import PreTrainedModel

GRADIENTS = "gradients"
"""Key by sequence, (N, D) float32: gradient of the step's loss with respect to the sequence's vector."""
LOSSES = "losses"
"""Key by sequence, (N,) float32: the sequence's part of the step's loss."""


class ContrastiveModel(Float32Buffers, ResidueModel, StepModel):
    """A backbone whose mean vectors are compared.

    The mean of all vectors is subtracted. With random weights it makes up nearly all of a vector, so that every cosine
    is near 1, and Adam's steps along it add to it. An export contains it in the bias of its last norm; a network
    without such a norm is trained without subtraction.
    """

    task = "contrastive"
    centre: Tensor

    def __init__(self, backbone: PackedBackbone, section: ContrastiveSection) -> None:
        super().__init__()
        self.backbone = backbone
        self.section = section
        norm = getattr(getattr(backbone.model, "encoder", None), "emb_layer_norm_after", None)
        self.is_centred = norm is not None
        self.register_buffer("centre", torch.zeros(backbone.hidden_size))

    @classmethod
    def build(cls, section: ModelSection, seed: int, *, empty: bool = False) -> "ContrastiveModel":
        """Build the model to train; see :meth:`esmeray.tasks.masked_lm.model.MaskedLM.build`."""
        backbone = residue_backbone(section.backbone, seed, empty=empty)
        with drawn(seed + 1, empty=empty):  # a different random stream than the backbone's
            adapt(backbone, section.backbone.lora)
            return cls(backbone, section.contrastive).train()

    def vectors(self, batch: PackedBatch) -> Tensor:
        """Return the means over residues, (N, D) fp32; filler sequences come last."""
        return mean_over_residues(self.backbone(batch), batch)

    def related(
        self, batches: Sequence[PackedBatch], vectors: Sequence[Tensor], gather: Callable[[Any], list[Any]], rank: int
    ) -> list[PackedBatch]:
        # Drop fillers: they come last, have no record, and must not be negatives.
        counts = [batch.records.numel() for batch in batches]
        own_ND = torch.cat([rows_ND[:count].cpu() for rows_ND, count in zip(vectors, counts, strict=True)])
        groups = torch.cat([batch.targets[:count].cpu() for batch, count in zip(batches, counts, strict=True)])
        workers = gather((own_ND, groups, torch.cat([batch.records.cpu() for batch in batches])))
        # In host memory like the batches; only a few hundred rows.
        vectors_ND, groups_NML, records_N = (torch.cat(rows) for rows in zip(*workers, strict=True))
        with torch.enable_grad():
            vectors_ND.requires_grad_()
            mean_D = vectors_ND.mean(0)
            centred_ND = vectors_ND - mean_D if self.is_centred else vectors_ND
            losses_N = contrastive_losses(centred_ND, groups_NML, records_N, self.section)
            (gradients_ND,) = torch.autograd.grad(losses_N.sum(), vectors_ND)
        if self.training:
            # A running mean, with a weight of 0.05 for the newest step.
            self.centre.lerp_(mean_D.detach().to(self.centre.device), 0.05)
        first = sum(len(worker[0]) for worker in workers[:rank])
        batches_with_gradients = []
        for batch, count in zip(batches, counts, strict=True):
            own_rows = slice(first, first + count)
            # Fillers get rows of zeros.
            padded_ND = functional.pad(gradients_ND[own_rows], (0, 0, 0, batch.num_sequences - count))
            padded_N = functional.pad(losses_N.detach()[own_rows], (0, batch.num_sequences - count))
            batches_with_gradients.append(batch.adding(by_sequence={GRADIENTS: padded_ND, LOSSES: padded_N}))
            first += count
        return batches_with_gradients

    def forward(self, batch: PackedBatch) -> TaskOutput:
        """Return a sum with the gradient of the step's loss, or of this batch's loss if no gradient was given.

        Metrics: ``targets``, the number of sequences, and ``loss``.
        """
        vectors_ND = self.vectors(batch)
        if batch.named(GRADIENTS) is None:
            (related,) = self.related([batch], [vectors_ND.detach()], lambda own: [own], 0)
            batch = related.to(vectors_ND.device)
        count = batch.records.numel()
        # Include all vectors, so that each parameter has a gradient. Fillers may be copies of other sequences: theirs
        # is set to 0.
        is_own_N1 = (torch.arange(batch.num_sequences, device=vectors_ND.device) < count).unsqueeze(1)
        loss_sum = (vectors_ND * batch.by_sequence[GRADIENTS] * is_own_N1).sum()
        num_targets = torch.full((), count, device=vectors_ND.device)
        loss = batch.by_sequence[LOSSES][:count].sum(dtype=torch.float64)
        return TaskOutput(loss_sum, num_targets, {"targets": num_targets.double(), "loss": loss})

    def network(self) -> "PreTrainedModel":
        # Merge in place, and once: the model is used for the export only.
        merge(self.backbone)
        if self.is_centred:
            self.backbone.model.encoder.emb_layer_norm_after.bias.data -= self.centre
            self.centre.zero_()
        return super().network()

    def card(self, family: str, size: str, network_code: Callable[[str, str], str]) -> Card:
        description = (
            f"# {family} of close relatives\n\n{family} with {size}. Proteins of one group have similar mean "
            "features (without special tokens). Compare the means by cosine similarity.\n"
        )
        return Card("feature-extraction", ("contrastive",), description, network_code("features", "last_hidden_state"))

    def metrics(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        """Return ``loss`` per sequence; empty without sequences."""
        values = scalar_sums(sums)
        return {"loss": values["loss"] / values["targets"]} if values["targets"] else {}


def contrastive_losses(
    vectors_ND: Tensor, groups_NML: Tensor, records_N: Tensor, section: ContrastiveSection
) -> Tensor:
    """Return the loss of each sequence, (N,) fp32; 0 if no other sequence shares a group with it."""
    weights_NN = torch.zeros(len(records_N), len(records_N), device=vectors_ND.device)
    # The closest level comes last, so that its weight overrides the others.
    for level, weight in reversed(list(enumerate(section.level_weights))):
        weights_NN = weights_NN.masked_fill(sharing(groups_NML[:, :, level]), weight)
    # A record may occur twice in a step, e.g. once per group. It is neither its own relative nor its own negative.
    is_same_NN = records_N[:, None] == records_N
    weights_NN = weights_NN.masked_fill(is_same_NN, 0.0)
    unit_ND = functional.normalize(vectors_ND, dim=1)
    similarities_NN = unit_ND @ unit_ND.T / section.temperature
    # A large number instead of infinity: for a row without other entries, 0 times infinity would be NaN.
    surprise_NN = -similarities_NN.masked_fill(is_same_NN, -1e9).log_softmax(1)
    return (weights_NN * surprise_NN).sum(1) / weights_NN.sum(1).clamp(min=torch.finfo(torch.float32).tiny)


def sharing(groups_NM: Tensor) -> Tensor:
    """Return which sequences share a group, (N, N) bool; negative ids are no groups."""
    shared_NN = torch.zeros(len(groups_NM), len(groups_NM), dtype=torch.bool, device=groups_NM.device)
    # One label of all sequences at a time: all labels at once would multiply the memory by their number.
    for ids_N in groups_NM.T:
        is_equal_NNM = (ids_N[:, None, None] == groups_NM) & (ids_N >= 0)[:, None, None]
        shared_NN |= is_equal_NNM.any(2)
    return shared_NN
