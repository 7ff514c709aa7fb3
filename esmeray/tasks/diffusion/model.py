"""Sequence diffusion: predict hidden residues from the other residues and from a backbone structure.

A masked language model and a structure encoder each compute features per residue. With an adapter as in LM-Design
(Zheng et al. 2023), each residue attends to the structure before the language model's own head. A new adapter is the
identity, so that training starts from the language model's predictions.

Shape legend: T tokens in the batch, M tokens with a target, N sequences, D channels of the backbone, H of the structure
encoder, K tokens of the vocabulary.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from pydantic import TypeAdapter
from torch import Tensor, nn
from torch.nn import functional

from esmeray.common.errors import expanded
from esmeray.dataset.fasta.alphabet import AMINO_ACIDS
from esmeray.dataset.packed_batch import LABELS, WEIGHTS, PackedBatch
from esmeray.dataset.tokens.base import EsmSequenceTokenizer, SequenceTokenizer
from esmeray.dataset.tokens.esm import VOCABULARY
from esmeray.model.attention.packed import attend
from esmeray.model.backbones.base import PackedBackbone
from esmeray.model.backbones.loading import drawn, residue_masked_lm
from esmeray.model.export.exported_folder import read_settings_of, write_settings
from esmeray.model.export.proteinmpnn_weights import WeightsSettings, open_proteinmpnn
from esmeray.model.section import BackboneSection
from esmeray.model.structures.encoder import StructureEncoder, TrainedEncoder
from esmeray.model.structures.proteinmpnn import ProteinMPNN
from esmeray.model.task_model import Card, TaskOutput, scalar_sums
from esmeray.tasks.diffusion.section import DiffusionSection
from esmeray.tasks.masked_lm.model import MaskedLM, hidden_residues, residue_metrics, residue_sums
from esmeray.tasks.section import ModelSection

WEIGHTS_FILE = "structdiff.safetensors"
CONFIG_FILE = "structdiff_config.json"
_EncoderWeights: TypeAdapter[WeightsSettings | None] = TypeAdapter(WeightsSettings | None)

_OPENING = """```python
from esmeray.tasks.diffusion.model import open_diffusion

model = open_diffusion("FOLDER")
```

or `esmeray design generate FOLDER --generate.structures FILE --generate.output DESIGNS`.
"""


class SequenceDiffusion(MaskedLM):
    """A masked language model on packed batches, with an adapter between backbone and head.

    ``labels``: names of the classes that sequences can be conditioned on.
    """

    task = "diffusion"
    saved_apart = ("backbone.", "lm_head.")

    def __init__(
        self,
        backbone: PackedBackbone,
        lm_head: nn.Module,
        section: DiffusionSection,
        labels: tuple[str, ...] = (),
        trained_encoder: tuple[ProteinMPNN, WeightsSettings] | None = None,
    ) -> None:
        super().__init__(backbone, lm_head)
        self.section, self.labels = section, labels
        channels = section.encoder.hidden_size
        checkpointing = bool(backbone.gradient_checkpointing)
        network, weights = trained_encoder or (None, None)
        self.encoder_weights: WeightsSettings | None = weights
        self.structure_encoder: StructureEncoder | TrainedEncoder = (
            StructureEncoder(section.encoder, checkpointing=checkpointing)
            if network is None
            else TrainedEncoder(network, frozen=section.encoder.frozen)
        )
        self.label_embedding = nn.Embedding(len(labels) + 1, channels)  # row 0: no label, or label dropped in training
        if network is not None:  # so that training starts from the predictions of ProteinMPNN
            nn.init.zeros_(self.label_embedding.weight)
        self.adapter = _Adapter(
            backbone.hidden_size, channels, backbone.config.num_attention_heads, section.adapter_size
        )

    @property
    def amino_acid_ids(self) -> Tensor:
        """(20,) ids of the amino acids in the backbone's vocabulary."""
        ids = torch.tensor(
            [VOCABULARY.index(letter) for letter in AMINO_ACIDS], device=self.label_embedding.weight.device
        )
        return ids if self.backbone.residue_ids is None else self.backbone.residue_ids[ids]

    @classmethod
    def build(
        cls, section: ModelSection, seed: int, labels: tuple[str, ...] = (), *, empty: bool = False
    ) -> "SequenceDiffusion":
        """Build the model to train; see :meth:`esmeray.tasks.masked_lm.model.MaskedLM.build`."""
        source = section.diffusion.encoder.source
        trained_encoder = None if source is None else open_proteinmpnn(source)
        backbone, head = residue_masked_lm(section.backbone, seed, empty=empty)
        with drawn(seed + 1, empty=empty):  # a different random stream than the backbone's
            return cls(backbone, head, section.diffusion, labels, trained_encoder).train()

    def forward(self, batch: PackedBatch) -> TaskOutput:
        """Compute the weighted cross entropy, summed over the targets.

        Metrics: ``targets``, ``loss`` (not weighted) and ``correct``. In evaluation also ``unconditional_loss``, the
        loss of the same batch without structures and labels.
        """
        positions_M, targets_M = hidden_residues(self.backbone, batch)
        features_TD, conditions_TH = self.backbone(batch), self.conditions(batch)
        # Compute the head only at the targets, as in masked language modelling. The adapter needs all tokens, as it
        # attends to all.
        logits_MK = self._logits(features_TD, conditions_TH, batch, positions_M)
        losses_M = functional.cross_entropy(logits_MK, targets_M, reduction="none")
        weights_N, weighted_M = batch.by_sequence.get(WEIGHTS), losses_M
        if weights_N is not None:
            weighted_M = losses_M * weights_N[batch.segment_ids().index_select(0, positions_M)]
        num_targets, metrics = residue_sums(losses_M, logits_MK, targets_M)
        # The backbone sees no structure, so its features are reused. In training this would cost a second adapter pass.
        if not self.training:
            logits_MK = self._logits(features_TD, self.no_conditions(batch), batch, positions_M)
            losses_M = functional.cross_entropy(logits_MK, targets_M, reduction="none")
            metrics["unconditional_loss"] = losses_M.sum(dtype=torch.float64)
        return TaskOutput(weighted_M.sum(), num_targets, metrics)

    def logits(self, batch: PackedBatch, conditions_TH: Tensor, guidance: float = 1.0) -> Tensor:
        """Return logits (T, K) of every token, in fp32.

        ``conditions_TH``: from :meth:`conditions`; they are the same in every step of a generation. ``guidance`` g:
        unconditional + g (conditional - unconditional), applied to logits (Ho and Salimans 2022, with their w = g - 1).
        1 is the conditional model.
        """
        features_TD = self.backbone(batch)
        conditional = self._logits(features_TD, conditions_TH, batch)
        if guidance == 1.0:  # same result at half the cost
            return conditional
        unconditional = self._logits(features_TD, self.no_conditions(batch), batch)
        return unconditional + guidance * (conditional - unconditional)

    def metrics(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        """Return ``loss`` and ``perplexity`` per hidden residue, ``residue_recovery``, and ``unconditional_loss``."""
        values = scalar_sums(sums)
        metrics = residue_metrics(values)
        if metrics and "unconditional_loss" in values:
            metrics["unconditional_loss"] = values["unconditional_loss"] / values["targets"]
        return metrics

    def conditions(self, batch: PackedBatch) -> Tensor:
        """Return the features of a batch's structures plus labels, (T, H)."""
        labels_N = batch.by_sequence[LABELS]
        # + 1, since a sequence without a label has -1.
        return self.structure_encoder(batch) + self.label_embedding(labels_N + 1)[batch.segment_ids()]

    def no_conditions(self, batch: PackedBatch) -> Tensor:
        """Return the features of sequences without structures and labels, (T, H)."""
        nothing = self.structure_encoder.unknown + self.label_embedding.weight[0]
        return nothing.expand(batch.num_tokens, -1)

    def card(self, family: str, size: str, network_code: Callable[[str, str], str]) -> Card:
        description = (
            f"# Sequences for a structure\n\nMasked diffusion on {family} with {size}, conditioned on a "
            "backbone structure. config.json describes the language model only, without the structure "
            "encoder.\n"
        )
        if weights := self.encoder_weights:
            description += f"\nThe structure encoder was trained from {weights.title}.\n"
        return Card(None, ("inverse-folding",), description, _OPENING)

    def save(self, folder: Path) -> None:
        self.save_own_weights(folder / WEIGHTS_FILE)
        weights = self.encoder_weights and self.encoder_weights.model_dump()
        settings = {"diffusion": self.section.model_dump(mode="json"), "labels": self.labels, "encoder": weights}
        write_settings(folder / CONFIG_FILE, settings)

    def _logits(
        self, features_TD: Tensor, conditions_TH: Tensor, batch: PackedBatch, positions_M: Tensor | None = None
    ) -> Tensor:
        adapted_TD = self.adapter(features_TD, conditions_TH, batch)
        if positions_M is not None:
            adapted_TD = adapted_TD.index_select(0, positions_M)
            conditions_TH = conditions_TH.index_select(0, positions_M)
        logits_TK = self.lm_head(adapted_TD).float()
        if isinstance(self.structure_encoder, TrainedEncoder):
            letters_T20 = self.structure_encoder.letters(conditions_TH).float()
            logits_TK = logits_TK.index_add(1, self.amino_acid_ids, letters_T20)
        return logits_TK


def open_diffusion(folder: str | Path) -> SequenceDiffusion:
    """Open an exported model, in fp32 on the CPU, in evaluation mode.

    Raises DataError (no such model, another format version, damaged files) or ConfigError (its backbone).
    """
    folder = expanded(folder).absolute()
    section, labels, weights = read_settings_of(
        folder / CONFIG_FILE,
        "model of sequence diffusion",
        lambda settings: (
            DiffusionSection.model_validate(settings["diffusion"]),
            tuple(settings["labels"]),
            _EncoderWeights.validate_python(settings.get("encoder")),  # missing in older exports
        ),
    )
    # The export has the weights, so that their source is not needed.
    trained_encoder = None if weights is None else (ProteinMPNN(weights.variant, weights.neighbours), weights)
    backbone, head = residue_masked_lm(BackboneSection(source=str(folder)), seed=0)
    with drawn(0):  # random weights are overwritten; the caller's random state must not change
        model = SequenceDiffusion(backbone, head, section, labels, trained_encoder)
    return model.load_own_weights(folder / WEIGHTS_FILE).eval()


def open_export(folder: Path) -> tuple[SequenceDiffusion, SequenceTokenizer]:
    """Open a model by :func:`open_diffusion`, with the tokenizer of residues."""
    return open_diffusion(folder), EsmSequenceTokenizer()


class _Adapter(nn.Module):
    """Attention of residues to the structure of their sequence, then a feed-forward layer. Initialized as the
    identity."""

    def __init__(self, channels: int, structure_channels: int, heads: int, inner: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.structure_norm = nn.LayerNorm(channels), nn.LayerNorm(structure_channels)
        self.own = nn.Linear(structure_channels, channels)
        self.query = nn.Linear(channels, channels)
        self.key, self.value = (nn.Linear(structure_channels, channels) for _ in range(2))
        self.output = nn.Linear(channels, channels)
        self.feed_forward = nn.Sequential(nn.Linear(channels, inner), nn.GELU(), nn.Linear(inner, channels))
        self.inner_norm = nn.LayerNorm(channels)
        # Both residual branches end in zero weights, so that training starts from the language model's prediction.
        for weight in (*self.output.parameters(), *self.feed_forward[-1].parameters()):
            nn.init.zeros_(weight)

    def forward(self, features_TD: Tensor, structure_TH: Tensor, batch: PackedBatch) -> Tensor:
        structure_TH = self.structure_norm(structure_TH)
        # A residue's own structure reaches it directly, the structure of the other residues through attention.
        queries_TD = self.norm(features_TD) + self.own(structure_TH)
        query, key, value = (
            rows.unflatten(-1, (self.heads, -1))
            for rows in (self.query(queries_TD), self.key(structure_TH), self.value(structure_TH))
        )
        seen_TD = attend(
            query, key, value, batch.cu_seqlens, batch.max_seqlen, scaling=query.shape[-1] ** -0.5
        ).flatten(1)
        adapted_TD = features_TD + self.output(seen_TD + self.own(structure_TH))
        return adapted_TD + self.feed_forward(self.inner_norm(adapted_TD))
