"""Supervised contrastive learning: a sequence's vector is close to those of its groups, far from all others.

The vector is the mean of a sequence's residues, which ``embed`` gives of the export as the output ``mean``. The loss is
that of Khosla et al. 2020 (Supervised contrastive learning, equation 2), where two sequences count by the closest level
at which they share a group. It is one of all sequences of a step, of which a batch holds a part: the vectors come
first, without gradients, and each batch then gets the gradient of the loss by its own (Gao et al. 2021, "Scaling deep
contrastive learning batch size under memory limited setup"). So memory is that of one batch.

Shape legend: N sequences, D channels, M labels of a sequence at most, L levels.
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
"""By sequence, (N, D) float32: of the step's loss by the sequence's vector."""
LOSSES = "losses"
"""By sequence, (N,) float32: its own part of the step's loss."""


class ContrastiveModel(Float32Buffers, ResidueModel, StepModel):
    """A backbone whose mean vectors are compared.

    What all vectors have in common is taken off them: from random weights it is nearly all of a vector, so that every
    cosine is near 1, and Adam's steps along it add to it. An export has that in the bias of its last norm; a network
    without such a norm is trained as it is.
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
        """The model to train; see :meth:`esmeray.tasks.masked_lm.model.MaskedLM.build`."""
        backbone = residue_backbone(section.backbone, seed, empty=empty)
        with drawn(seed + 1, empty=empty):  # not the backbone's stream again
            adapt(backbone, section.backbone.lora)
            return cls(backbone, section.contrastive).train()

    def vectors(self, batch: PackedBatch) -> Tensor:
        """(N, D) fp32, the means of the residues; those of fillers last."""
        return mean_over_residues(self.backbone(batch), batch)

    def related(
        self, batches: Sequence[PackedBatch], vectors: Sequence[Tensor], gather: Callable[[Any], list[Any]], rank: int
    ) -> list[PackedBatch]:
        # Without fillers, which come last, have no record, and are no one's negatives.
        counts = [batch.records.numel() for batch in batches]
        own_ND = torch.cat([rows_ND[:count].cpu() for rows_ND, count in zip(vectors, counts, strict=True)])
        groups = torch.cat([batch.targets[:count].cpu() for batch, count in zip(batches, counts, strict=True)])
        workers = gather((own_ND, groups, torch.cat([batch.records.cpu() for batch in batches])))
        # In host memory, a few hundred rows, as the batches still are.
        vectors_ND, groups_NML, records_N = (torch.cat(rows) for rows in zip(*workers, strict=True))
        with torch.enable_grad():
            vectors_ND.requires_grad_()
            mean_D = vectors_ND.mean(0)
            centred_ND = vectors_ND - mean_D if self.is_centred else vectors_ND
            losses_N = contrastive_losses(centred_ND, groups_NML, records_N, self.section)
            (gradients_ND,) = torch.autograd.grad(losses_N.sum(), vectors_ND)
        if self.training:
            # A running mean, in which the newest step has a share of a twentieth.
            self.centre.lerp_(mean_D.detach().to(self.centre.device), 0.05)
        first = sum(len(worker[0]) for worker in workers[:rank])
        batches_with_gradients = []
        for batch, count in zip(batches, counts, strict=True):
            own_rows = slice(first, first + count)
            # Rows of zeros for the fillers.
            padded_ND = functional.pad(gradients_ND[own_rows], (0, 0, 0, batch.num_sequences - count))
            padded_N = functional.pad(losses_N.detach()[own_rows], (0, batch.num_sequences - count))
            batches_with_gradients.append(batch.adding(by_sequence={GRADIENTS: padded_ND, LOSSES: padded_N}))
            first += count
        return batches_with_gradients

    def forward(self, batch: PackedBatch) -> TaskOutput:
        """A sum whose gradient is that of the step's loss; of a batch alone, where none was given.

        Metrics: ``targets``, which are sequences, and ``loss``.
        """
        vectors_ND = self.vectors(batch)
        if batch.named(GRADIENTS) is None:
            (related,) = self.related([batch], [vectors_ND.detach()], lambda own: [own], 0)
            batch = related.to(vectors_ND.device)
        count = batch.records.numel()
        # All vectors, so that each parameter has a gradient; a filler's, which may be a copy of another, is 0.
        is_own_N1 = (torch.arange(batch.num_sequences, device=vectors_ND.device) < count).unsqueeze(1)
        loss_sum = (vectors_ND * batch.by_sequence[GRADIENTS] * is_own_N1).sum()
        num_targets = torch.full((), count, device=vectors_ND.device)
        loss = batch.by_sequence[LOSSES][:count].sum(dtype=torch.float64)
        return TaskOutput(loss_sum, num_targets, {"targets": num_targets.double(), "loss": loss})

    def network(self) -> "PreTrainedModel":
        from esmeray.model.backbones.huggingface_loading import transformers_network

        # In place, and once: an export's model is its own.
        merge(self.backbone)
        if self.is_centred:
            self.backbone.model.encoder.emb_layer_norm_after.bias.data -= self.centre
            self.centre.zero_()
        return transformers_network(self.backbone.model)

    def card(self, family: str, size: str, network_code: Callable[[str, str], str]) -> Card:
        description = (
            f"# {family} of close relatives\n\n{family} with {size}, the mean of whose features, without special "
            "tokens, lies close for proteins of one group. Compare means by their cosine.\n"
        )
        return Card("feature-extraction", ("contrastive",), description, network_code("features", "last_hidden_state"))

    def metrics(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        """``loss`` per sequence; none without one."""
        values = scalar_sums(sums)
        return {"loss": values["loss"] / values["targets"]} if values["targets"] else {}


def contrastive_losses(
    vectors_ND: Tensor, groups_NML: Tensor, records_N: Tensor, section: ContrastiveSection
) -> Tensor:
    """(N,) fp32, the loss of each sequence; 0 where no other one shares a group with it."""
    weights_NN = torch.zeros(len(records_N), len(records_N), device=vectors_ND.device)
    # The closest level last, whose weight counts.
    for level, weight in reversed(list(enumerate(section.level_weights))):
        weights_NN = weights_NN.masked_fill(sharing(groups_NML[:, :, level]), weight)
    # A record that stands twice in a step, as each pair of it does, is neither its own relative nor foreign to itself.
    is_same_NN = records_N[:, None] == records_N
    weights_NN = weights_NN.masked_fill(is_same_NN, 0.0)
    unit_ND = functional.normalize(vectors_ND, dim=1)
    similarities_NN = unit_ND @ unit_ND.T / section.temperature
    # A large number and not infinity: a row may have nothing else, and its 0 times infinity would be NaN.
    surprise_NN = -similarities_NN.masked_fill(is_same_NN, -1e9).log_softmax(1)
    return (weights_NN * surprise_NN).sum(1) / weights_NN.sum(1).clamp(min=torch.finfo(torch.float32).tiny)


def sharing(groups_NM: Tensor) -> Tensor:
    """(N, N) bool: which sequences share a group; negative ones are none."""
    shared_NN = torch.zeros(len(groups_NM), len(groups_NM), dtype=torch.bool, device=groups_NM.device)
    # One label of all sequences at a time: with all at once memory would grow with the square of their number.
    for ids_N in groups_NM.T:
        is_equal_NNM = (ids_N[:, None, None] == groups_NM) & (ids_N >= 0)[:, None, None]
        shared_NN |= is_equal_NNM.any(2)
    return shared_NN
