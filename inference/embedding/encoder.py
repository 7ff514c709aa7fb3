"""A model that turns packed batches of proteins into the outputs of an embedding job.

In: the name of a model: a folder or hub name of transformers, an Esmeray run or its export. Out: rows of each output,
special tokens left out: one a protein, one a residue, or one a pair of residues.

Shape legend: T tokens of a batch, N sequences, R residues of all of them, D channels.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.profiler import record_function

from common.errors import ConfigError, DataError, EsmerayError
from dataset.packed_batch import PackedBatch
from dataset.tokens.base import EsmSequenceTokenizer, SequenceTokenizer
from dataset.tokens.esm import packed_from_tokens, sequence_lengths, tokenize_pieces
from dataset.tokens.model_folder import CONFIG_FILE, local_folder
from inference.embedding.settings import OF_LAYERS, EmbeddingSettings, ModelFacts, Output, outputs_of
from inference.exported import EXPORT_FOLDER
from model.backbones.architectures import MASKED_LM_HEADS, PACKED
from model.backbones.base import PackedBackbone
from model.backbones.esm2 import EsmBackbone
from model.backbones.fingerprint import architecture, features_fingerprint, weights_fingerprint
from model.backbones.loading import build_backbone, build_masked_lm
from model.backbones.lora import merge
from model.backbones.residues import residue_tokenizer
from model.backbones.source import SOURCE_KEY, is_drawn, source_type
from model.cost.flops import forward_flops
from model.device import DTYPES
from model.export.classifier import load_classifier
from model.export.exported_folder import CONFIG_FILE as CLASSIFIER_FILE
from model.tasks.autoencoder import CONFIG_FILE as AUTOENCODER_FILE
from model.tasks.autoencoder import ESM2Autoencoder
from model.tasks.embedding import optimize_for_inference
from model.tasks.pooling import first_token, max_over_residues, mean_over_residues, residue_mask
from train_config.schema import BackboneSection

Features: TypeAlias = dict[int | str, Tensor]
"""(T, C) by layer, or by ``logits`` and ``latents``."""


class Encoder:
    """A model on one device. Raises ConfigError, DataError and ResourceError as the model's loading does.

    Args:
        source: folder or name of the model.
        device: where it runs.
        random_weights: take a size whose weights are drawn from a fixed seed, to try a job out.
        every_output: have all outputs of the model, in place of those of the settings.
    """

    def __init__(
        self,
        source: str,
        settings: EmbeddingSettings,
        device: torch.device | str,
        *,
        random_weights: bool = False,
        every_output: bool = False,
    ) -> None:
        self.settings, self.device = settings, torch.device(device)
        loaded = _load(source, every_output or "logits" in settings.outputs, random_weights)
        self.tokenizer: SequenceTokenizer = loaded["tokenizer"]
        self._head: nn.Module | None = loaded.get("head")
        self._autoencoder: ESM2Autoencoder | None = loaded.get("autoencoder")
        backbone: PackedBackbone = loaded["backbone"]
        modules: list[nn.Module] = [backbone]
        if self._head is not None:
            modules.append(self._head)
        if self._autoencoder is not None:
            parts = [
                getattr(self._autoencoder, name) for name in ("normalization", "encoder", "decoder", "residue_head")
            ]
            modules.append(nn.ModuleList(parts))
        _check_finite(source, modules)
        if settings.long == "window" and not self.tokenizer.one_token_per_residue:
            raise ConfigError("--long window: this model's tokens are not single residues; choose crop")
        channels = self._channels(backbone)
        if every_output:
            settings = settings.model_copy(update={"outputs": list(channels)})
        outputs = outputs_of(settings, backbone.num_layers, channels)
        self.facts = self._facts(source, backbone, modules, outputs, random_weights)
        for module in modules:
            module.to(self.device)
        dtype = DTYPES[settings.precision or "fp32"]
        for head in modules[1:]:
            head.requires_grad_(False).eval().to(dtype)
        self.backbone = optimize_for_inference(backbone, dtype)
        self._prefix, self._suffix = len(self.tokenizer.prefix), len(self.tokenizer.suffix)

    @record_function("tokenize")
    def pack(self, sequences: Sequence[bytes | memoryview]) -> PackedBatch:
        """One batch of these sequences, on the CPU, in the model's own vocabulary; pinned where it is on CUDA.

        ``target_positions`` are its residues, for outputs that have a row for each.
        """
        batch = self._packed(sequences)
        if any(output.per == "residue" for output in self.facts.outputs):
            batch = replace(batch, target_positions=residue_mask(batch, self._prefix, self._suffix).nonzero()[:, 0])
        return batch.pin_memory() if self.device.type == "cuda" else batch

    def _packed(self, sequences: Sequence[bytes | memoryview]) -> PackedBatch:
        lengths_N = sequence_lengths(sequences)
        if isinstance(self.tokenizer, EsmSequenceTokenizer):
            return packed_from_tokens(tokenize_pieces(sequences), lengths_N + self._prefix + self._suffix)
        tokens, lengths_N = self.tokenizer.encode([bytes(sequence).decode("ascii") for sequence in sequences])
        around = np.array([*self.tokenizer.suffix, *self.tokenizer.prefix], dtype=np.int32)
        parts = [around[self._suffix :]]
        for piece in np.split(tokens, np.cumsum(lengths_N)[:-1]):
            parts += [piece, around]
        joined = np.concatenate(parts)
        lengths_N = lengths_N + self._prefix + self._suffix
        return packed_from_tokens(joined[: int(lengths_N.sum())], lengths_N)

    @torch.inference_mode()
    def encode(self, batch: PackedBatch, names: Collection[str] | None = None) -> dict[str, Tensor]:
        """The rows of each output, or of those of these names, of a batch on the device, in the order of its sequences.

        (N, C) fp32 for proteins, (R, C) for residues, (sum of squared lengths, 1) for pairs; ``finite`` () bool says
        that all are.
        """
        outputs = [output for output in self.facts.outputs if names is None or output.name in names]
        return self._outputs(outputs, self._features(batch, outputs), batch, self._prefix, self._suffix)

    @torch.inference_mode()
    def decode(self, latents: Sequence[Tensor]) -> list[Tensor]:
        """(L, K) fp32 logits over the ESM vocabulary of the residues of each protein, from an autoencoder's latents."""
        assert self._autoencoder is not None
        return self._autoencoder.decode(latents)[1]

    @torch.inference_mode()
    def encode_windows(self, sequence: bytes | memoryview, length: int, overlap: int, budget: int) -> dict[str, Tensor]:
        """The same of one sequence, whose features are averaged over the windows of ``length`` that hold a residue.

        Neighbouring windows share ``overlap`` residues, the last two more. <cls> is the mean of the windows' own.
        """
        total = len(sequence)
        starts = [*range(0, total - length, length - overlap), total - length]
        size = max(1, budget // (length + self._prefix + self._suffix))
        sums: Features = {}
        firsts: Features = {}
        counts_R1 = torch.zeros(total, 1, device=self.device)
        for first in range(0, len(starts), size):
            some = starts[first : first + size]
            batch = self.pack([sequence[start : start + length] for start in some]).to(self.device)
            features = self._features(batch, self.facts.outputs)
            for name, features_TC in features.items():
                padded = features_TC.float().view(len(some), -1, features_TC.shape[1])
                summed = sums.setdefault(name, torch.zeros(total, features_TC.shape[1], device=self.device))
                firsts[name] = firsts.get(name, 0) + padded[:, 0].sum(0, keepdim=True)
                for row_LC, start in zip(padded, some, strict=True):
                    summed[start : start + length] += row_LC[self._prefix : self._prefix + length]
            for start in some:
                counts_R1[start : start + length] += 1
        means = {name: summed / counts_R1 for name, summed in sums.items()}
        whole = packed_from_tokens(np.zeros(total, dtype=np.int64), np.array([total])).to(self.device)
        mean_firsts = {name: first / len(starts) for name, first in firsts.items()}
        return self._outputs(self.facts.outputs, means, whole, 0, 0, mean_firsts)

    def _channels(self, backbone: PackedBackbone) -> dict[str, int]:
        """Channels of each kind of output that the model has."""
        channels: dict[str, int] = dict.fromkeys(OF_LAYERS, backbone.hidden_size)
        if not self.tokenizer.prefix:
            del channels["cls"]
        if not self.tokenizer.one_token_per_residue:
            del channels["residues"]
        elif self._head is not None:
            channels["logits"] = int(backbone.config.vocab_size)
        if isinstance(backbone, EsmBackbone) and hasattr(backbone.model, "contact_head"):
            channels["contacts"] = 1
        if self._autoencoder is not None:
            channels |= {"latents": self._autoencoder.latent_size, "mean_latents": self._autoencoder.latent_size}
        return channels

    def _facts(
        self,
        source: str,
        backbone: PackedBackbone,
        modules: Sequence[nn.Module],
        outputs: tuple[Output, ...],
        random_weights: bool,
    ) -> ModelFacts:
        weights = [weights_fingerprint(module) for module in modules]
        described = [*weights, architecture(backbone), self.tokenizer.fingerprint]
        special = len(self.tokenizer.prefix) + len(self.tokenizer.suffix)
        settings = self.settings
        key = partial(
            features_fingerprint,
            backbone,
            weights[0],
            self.tokenizer.fingerprint,
            settings.max_length,
            "start" if settings.long == "crop" else f"{settings.long} {settings.overlap}",
            settings.precision or "fp32",
        )
        per_token, per_pair = forward_flops(backbone)
        return ModelFacts(
            name=source,
            fingerprint=hashlib.sha256(json.dumps(described, sort_keys=True, default=str).encode()).hexdigest()[:32],
            num_layers=backbone.num_layers,
            hidden_size=backbone.hidden_size,
            outputs=outputs,
            longest=None if backbone.longest is None else backbone.longest - special,
            flops_per_token=per_token,
            attention_flops=per_pair,
            device_name=_device_name(self.device),
            random_weights=random_weights,
            cache_keys={o.name: key(o.kind if o.layer == backbone.num_layers else o.name) for o in outputs},
        )

    def _features(self, batch: PackedBatch, outputs: Sequence[Output]) -> Features:
        wanted = {output.kind for output in outputs}
        of_last = wanted & {"logits", "latents", "mean_latents"}
        asked = {output.layer for output in outputs if output.layer is not None}
        layers = sorted(asked | ({self.backbone.num_layers} if of_last else set()))
        states = self.backbone.hidden_states(batch, layers) if layers else {}
        features: Features = {layer: states[layer] for layer in layers}
        if "contacts" in wanted:
            features["contacts"] = batch.tokens  # whose attention is computed again, a sequence at a time
        last = features.get(self.backbone.num_layers)
        if self._head is not None and last is not None and "logits" in wanted:
            features["logits"] = self._head(last)
        if self._autoencoder is not None and last is not None and wanted & {"latents", "mean_latents"}:
            features["latents"] = self._autoencoder.latents(last)
        return features

    @record_function("pooling")
    def _outputs(
        self,
        outputs: Sequence[Output],
        features: Features,
        batch: PackedBatch,
        prefix: int,
        suffix: int,
        firsts: Mapping[int | str, Tensor] | None = None,
    ) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for output in outputs:
            kind = output.kind
            if kind == "contacts":
                found[output.name] = self._contacts(batch)
                continue
            source = output.layer if output.layer is not None else kind.removeprefix("mean_")
            features_TC = features[source]
            if kind in ("mean", "mean_latents"):
                rows = mean_over_residues(features_TC, batch, prefix, suffix)
            elif kind == "max":
                rows = max_over_residues(features_TC, batch, prefix, suffix)
            elif kind == "cls":
                rows = first_token(features_TC, batch) if firsts is None else firsts[source]
            else:
                rows = features_TC if batch.target_positions is None else features_TC[batch.target_positions]
            found[output.name] = rows
        finite = torch.stack([rows.isfinite().all() for rows in found.values()]).all()
        return {**found, "finite": finite}

    def _contacts(self, batch: PackedBatch) -> Tensor:
        """(sum of squared lengths, 1) fp32."""
        assert isinstance(self.backbone, EsmBackbone)
        sequences = batch.tokens.split(batch.cu_seqlens.diff().tolist())
        return torch.cat([self.backbone.contacts(tokens).reshape(-1, 1) for tokens in sequences])


def _load(source: str, with_head: bool, random_weights: bool) -> dict[str, Any]:
    """Backbone and tokenizer of a model, and the head or autoencoder that it has; messages name --model."""
    try:
        return _loaded(source, with_head, random_weights)
    except EsmerayError as error:
        raise type(error)(*(problem.replace(SOURCE_KEY, "--model") for problem in error.problems)) from error


def _loaded(source: str, with_head: bool, random_weights: bool) -> dict[str, Any]:
    section = BackboneSection(source=source, frozen=True)
    if is_drawn(section) and not random_weights:
        raise ConfigError(
            f"--model {source}: a size whose weights would be random; trained ones are a folder or a hub name as in "
            "facebook/esm2_t6_8M_UR50D (pass --random-weights to try a job out)"
        )
    folder = None if is_drawn(section) else local_folder(source, "--model")
    if folder is not None:
        if (folder / EXPORT_FOLDER / CONFIG_FILE).is_file():
            folder = folder / EXPORT_FOLDER
        elif (folder / "metrics.jsonl").is_file():
            raise ConfigError(f"--model {source}: a run without an export; 'esmeray train export {source}' makes one")
        if (folder / CLASSIFIER_FILE).is_file():
            classifier, tokenizer = load_classifier(folder)
            merge(classifier.backbone)
            return {"backbone": classifier.backbone, "tokenizer": tokenizer}
        if (folder / AUTOENCODER_FILE).is_file():
            autoencoder = ESM2Autoencoder.from_pretrained(folder)
            tokens = EsmSequenceTokenizer()
            return {"backbone": autoencoder.backbone, "tokenizer": tokens, "autoencoder": autoencoder}
        section = BackboneSection(source=str(folder), frozen=True)
    kind = source_type(section)
    section = section.model_copy(update={"padded": kind != "esm" and kind not in PACKED})
    tokenizer = residue_tokenizer(section)
    vocabulary = tokenizer.vocabulary_size, tokenizer.pad
    if with_head and kind in MASKED_LM_HEADS:
        backbone, head = build_masked_lm(section, 0, *vocabulary)
        return {"backbone": backbone, "tokenizer": tokenizer, "head": head}
    return {"backbone": build_backbone(section, 0, *vocabulary), "tokenizer": tokenizer}


def _check_finite(source: str, modules: Sequence[nn.Module]) -> None:
    for module in modules:
        for name, tensor in module.state_dict().items():
            if not bool(tensor.isfinite().all()):
                raise DataError(
                    f"--model {source}: the weights {name} hold NaN or infinity; fetch or export them again"
                )


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
