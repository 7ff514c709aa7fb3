"""Diffusion of an autoencoder's latents: from noise to latents that its decoder reads as a sequence.

In: packed batches whose residues all have their id as target, with a seed for each sequence. Out: the squared error of
the velocity (v-prediction, Salimans and Ho 2022) of normalised latents z at a time t, drawn uniformly from [0, 1]:
a = cos(t pi / 2), s = sin(t pi / 2), noisy = a z + s noise, v = a noise - s z. The autoencoder stays as it is. The
denoiser is a protein language model's layers on embeddings of noisy latents, time and conditions.

Shape legend: T tokens in the batch, M residues, N sequences, Z channels of a latent, D of the backbone, H of the
structure encoder, K tokens of the alphabet.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from common.errors import ConfigError
from dataset.packed_batch import PackedBatch
from model.backbones.base import PackedBackbone
from model.backbones.esm2 import EsmBackbone
from model.backbones.loading import quiet_transformers, seeded
from model.backbones.residues import residue_backbone, residue_masked_lm
from model.tasks.autoencoder import ESM2Autoencoder
from model.tasks.base import TaskOutput, load_own_weights, scalar_sums, target_positions, targets_of
from model.tasks.diffusion import CONFIG_FILE, WEIGHTS_FILE, Diffusion, SequenceDiffusion, read_diffusion_settings
from model.tasks.normalization import FeatureNormalization, FeatureStatistics
from train_config.diffusion_schema import DiffusionSection
from train_config.schema import BackboneSection, ModelSection

AUTOENCODER_FOLDER = "autoencoder"
_EXPORT_FOLDER = "export"
_FREQUENCIES = 64


class Noisy(NamedTuple):
    """Latents at a time: (T, Z), with (T, 1) cosine and sine of the time."""

    latents: Tensor
    cosine: Tensor
    sine: Tensor

    def clean(self, velocity_TZ: Tensor) -> Tensor:
        """(T, Z): the latents that a velocity says are behind the noise."""
        return self.cosine * self.latents - self.sine * velocity_TZ


class LatentDiffusion(Diffusion):
    """Predicts the velocity of noisy latents on packed batches.

    Args:
        backbone: an ESM-2, whose word embeddings are not used.
        autoencoder: gives the latents and reads them.
    """

    def __init__(
        self,
        backbone: PackedBackbone,
        autoencoder: ESM2Autoencoder,
        section: DiffusionSection,
        labels: tuple[str, ...] = (),
    ) -> None:
        super().__init__(backbone, section, labels)
        if not isinstance(backbone, EsmBackbone):
            raise ConfigError("model.diffusion.space latents needs an ESM-2 as model.backbone")
        if not autoencoder.section.residue_loss_weight:
            raise ConfigError("model.diffusion.autoencoder has residue_loss_weight 0: it reads no residues")
        self.autoencoder = autoencoder.requires_grad_(False).eval()
        channels, size = backbone.hidden_size, autoencoder.latent_size
        self.normalization = FeatureNormalization(size)
        backbone.model.embeddings.word_embeddings.requires_grad_(False)
        self.embed = nn.Linear(2 * size, channels)
        self.embed_time = nn.Sequential(
            nn.Linear(2 * _FREQUENCIES, channels), nn.SiLU(), nn.Linear(channels, channels)
        )  # fmt: skip
        self.embed_conditions = nn.Linear(section.encoder.hidden_size, channels)
        self.velocity_head = nn.Linear(channels, size)

    def train(self, mode: bool = True) -> LatentDiffusion:
        """Set training mode; the autoencoder stays in evaluation mode."""
        super().train(mode)
        self.autoencoder.eval()
        return self

    def forward(self, batch: PackedBatch) -> TaskOutput:
        """Squared error of the velocity, a mean over channels, summed over the residues.

        Metrics: ``targets``, ``loss`` and ``correct`` (residues that the decoder reads right from the latents that the
        velocity says); in evaluation also ``unconditional_loss``.
        """
        positions_M = target_positions(batch)
        clean_TZ = self.latents(batch)
        noise_TZ, angle_T1, own_T1 = self._drawn(batch)
        noisy = noised(clean_TZ, noise_TZ, angle_T1)
        wanted_TZ = noisy.cosine * noise_TZ - noisy.sine * clean_TZ
        conditions_TH = self.conditions(batch)
        guess_TZ = torch.zeros_like(clean_TZ)
        if self.section.self_condition:
            with torch.no_grad():
                guess_TZ = own_T1 * noisy.clean(self.velocity(noisy, conditions_TH, batch, guess_TZ))

        def losses(conditions_TH: Tensor) -> tuple[Tensor, Tensor]:
            velocity_TZ = self.velocity(noisy, conditions_TH, batch, guess_TZ)
            return (velocity_TZ - wanted_TZ).square().mean(-1).index_select(0, positions_M), velocity_TZ

        losses_M, velocity_TZ = losses(conditions_TH)
        with torch.no_grad():
            read_M = self.residue_logits(noisy.clean(velocity_TZ)).argmax(-1).index_select(0, positions_M)
            num_targets = torch.full((), positions_M.numel(), device=losses_M.device)
            metrics = {
                "targets": num_targets.double(),
                "loss": losses_M.sum(dtype=torch.float64),
                "correct": (read_M == targets_of(batch).index_select(0, positions_M)).sum().double(),
            }
            if not self.training:
                metrics["unconditional_loss"] = losses(self.no_conditions(batch))[0].sum(dtype=torch.float64)
        return TaskOutput(losses_M.sum(), num_targets, metrics)

    def metrics(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        """``loss`` and ``unconditional_loss`` per residue (1: no better than the mean), ``residue_recovery``."""
        values = scalar_sums(sums)
        count = values.pop("targets")
        values["residue_recovery"] = values.pop("correct")
        return {name: value / count for name, value in values.items()} if count else {}

    @torch.no_grad()
    def latents(self, batch: PackedBatch) -> Tensor:
        """(T, Z) fp32 normalised latents of a batch's sequences."""
        return self.normalization(self.autoencoder.latents(self.autoencoder.backbone(batch)))

    def residue_logits(self, latents_TZ: Tensor) -> Tensor:
        """(T, K) fp32: how the autoencoder's decoder reads normalised latents."""
        (logits_TK,) = self.autoencoder.decode([self.normalization.inverse(latents_TZ)])[1]
        return logits_TK

    def velocity(
        self, noisy: Noisy, conditions_TH: Tensor, batch: PackedBatch, guess_TZ: Tensor, guidance: float = 1.0
    ) -> Tensor:
        """(T, Z) fp32 velocity, ``guess_TZ`` being an earlier guess of the clean latents (0 for none); guidance as in
        :meth:`~model.tasks.diffusion.SequenceDiffusion.logits`."""
        dtype = self.embed.weight.dtype
        rates = torch.logspace(0, 3, _FREQUENCIES, device=noisy.sine.device)
        angles = torch.atan2(noisy.sine, noisy.cosine) * rates
        time_TD = self.embed_time(torch.cat([angles.sin(), angles.cos()], -1).to(dtype))
        own_TD = self.embed(torch.cat([noisy.latents, guess_TZ], -1).to(dtype)) + time_TD

        def velocity(conditions_TH: Tensor) -> Tensor:
            assert isinstance(self.backbone, EsmBackbone)
            hidden_TD = self.backbone.from_embeddings(own_TD + self.embed_conditions(conditions_TH.to(dtype)), batch)
            found: Tensor = self.velocity_head(hidden_TD)
            return found.float()

        conditional = velocity(conditions_TH)
        if guidance == 1.0:
            return conditional
        unconditional = velocity(self.no_conditions(batch))
        return unconditional + guidance * (conditional - unconditional)

    @torch.no_grad()
    def measure(self, batch: PackedBatch, statistics: FeatureStatistics) -> None:
        """Add the residues of one batch to the statistics of :attr:`normalization`."""
        residues_T = torch.zeros(batch.num_tokens, dtype=torch.bool, device=batch.tokens.device)
        residues_T[target_positions(batch)] = True
        statistics.update(self.autoencoder.latents(self.autoencoder.backbone(batch)), residues_T)

    def save(self, folder: Path) -> None:
        super().save(folder)
        inner = folder / AUTOENCODER_FOLDER
        inner.mkdir()
        with quiet_transformers():
            self.autoencoder.backbone.model.save_pretrained(inner)
        self.autoencoder.save(inner)

    def _drawn(self, batch: PackedBatch) -> tuple[Tensor, Tensor, Tensor]:
        """(T, Z) noise, (T, 1) time as an angle, and (T, 1) 1 where an earlier guess is given, by the seeds alone."""
        assert batch.seeds is not None
        lengths = batch.cu_seqlens.diff().tolist()
        draws = [torch.Generator().manual_seed(seed) for seed in batch.seeds.tolist()]
        pairs = torch.stack([torch.rand(2, generator=each) for each in draws])
        size = self.autoencoder.latent_size
        noise = [torch.randn(length, size, generator=each) for each, length in zip(draws, lengths, strict=True)]
        device = batch.tokens.device
        pairs_T2 = pairs.to(device)[batch.segment_ids()]
        return torch.cat(noise).to(device), pairs_T2[:, :1] * math.pi / 2, (pairs_T2[:, 1:] < 0.5).float()


def noised(clean_TZ: Tensor, noise_TZ: Tensor, angle_T1: Tensor) -> Noisy:
    """Latents with noise of a time given as an angle, 0 (clean) to pi / 2 (noise)."""
    cosine_T1, sine_T1 = angle_T1.cos(), angle_T1.sin()
    return Noisy(cosine_T1 * clean_TZ + sine_T1 * noise_TZ, cosine_T1, sine_T1)


def build_diffusion(
    section: ModelSection, seed: int, labels: tuple[str, ...] = (), *, empty: bool = False
) -> Diffusion:
    """The model to train in the space that the settings say; see :meth:`model.tasks.masked_lm.MaskedLM.build`."""
    if section.diffusion.space == "tokens":
        return SequenceDiffusion.build(section, seed, labels, empty=empty)
    source = Path(section.diffusion.autoencoder or "").expanduser()
    run_export = source / _EXPORT_FOLDER
    autoencoder = ESM2Autoencoder.from_pretrained(run_export if run_export.is_dir() else source)
    backbone = residue_backbone(section.backbone, seed)
    with seeded(seed + 1):
        return LatentDiffusion(backbone, autoencoder, section.diffusion, labels).train()


def open_diffusion(folder: str | Path) -> Diffusion:
    """An exported model of either space, in fp32 on the CPU, in evaluation mode.

    Raises DataError (the folder holds none, one of another format version, or damaged files) or ConfigError (its
    backbone is not known, or not in safetensors).
    """
    folder = Path(folder).expanduser().absolute()
    section, labels = read_diffusion_settings(folder / CONFIG_FILE)
    with seeded(0):
        model: Diffusion
        if section.space == "tokens":
            backbone, head = residue_masked_lm(BackboneSection(source=str(folder)), seed=0)
            model = SequenceDiffusion(backbone, head, section, labels)
        else:
            backbone = residue_backbone(BackboneSection(source=str(folder)), seed=0)
            autoencoder = ESM2Autoencoder.from_pretrained(folder / AUTOENCODER_FOLDER)
            model = LatentDiffusion(backbone, autoencoder, section, labels)
    load_own_weights(model, model.own_state(), folder / WEIGHTS_FILE)
    return model.eval()
