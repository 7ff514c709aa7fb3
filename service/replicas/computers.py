"""Models as the service computes with them: a batch of items to the result of each.

In: items of any outputs that the model has. Out: an array for each. What an item wants costs the others nothing but a
layer that they share a pass with.

Shape legend: L residues of a sequence, D channels, K classes or tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from common.errors import ConfigError, DataError, ResourceError
from dataset.embeddings.cache import FeatureStore
from dataset.fasta.alphabet import residues_of
from dataset.packed_batch import PackedBatch
from dataset.tokens.base import EsmSequenceTokenizer
from dataset.tokens.esm import MASK, VOCABULARY, pack_sequences
from inference.classifier import ClassifierPipeline
from inference.embedding.encoder import Encoder
from inference.embedding.settings import EmbeddingSettings
from inference.exported import config_of, model_folder
from model.backbones.fingerprint import weights_fingerprint
from model.device import is_out_of_memory
from model.tasks.pooling import residue_mask
from service.replicas.batcher import Item
from train_config.service_schema import ServedModel

MASKED, DECODED, CLASSES = "masked", "decoded", "classes"
"""Outputs besides those of :mod:`inference.embedding.settings`: logits of the masked tokens of a sequence (M, K), those
of residues decoded from latents (L, K), and probabilities of a classifier, (K,) or (L, K)."""


@dataclass(frozen=True)
class About:
    """A served model, for the ingress and for ``/v1/models``.

    Attributes:
        outputs: channels of each, by name.
        per_residue: outputs with a row for each residue.
        vocabulary: tokens of the logits; empty where there are none.
        labels, label_kind: of a classifier, else empty.
        one_token_per_residue: sequences are of residues; else they are any text.
        longest: residues of a sequence at most; None for any.
        fingerprint: of weights and architecture.
    """

    name: str
    source: str
    outputs: dict[str, int]
    per_residue: tuple[str, ...]
    vocabulary: tuple[str, ...]
    labels: tuple[str, ...]
    label_kind: str
    one_token_per_residue: bool
    longest: int | None
    fingerprint: str
    device: str
    precision: str
    batch_tokens: int
    random_weights: bool


class Computer(Protocol):
    """A model on a device."""

    about: About

    def item(self, output: str, payload: Any) -> Item:
        """The item of a text, or of latents (L, D)."""

    def compute(self, items: Sequence[Item]) -> list[NDArray[np.float32]]:
        """The result of each; raises ResourceError where a single one is out of memory, DataError for NaN."""

    def tokens(self, text: str) -> list[int]:
        """Ids of a text, special tokens included."""


def load(model: ServedModel, device: str) -> Computer:
    """The model that the settings name; raises what its loading raises."""
    try:
        folder = model_folder(model.source)
    except ConfigError:
        return _EncoderComputer(model, device)
    return _ClassifierComputer(model, folder, device)


class _EncoderComputer:
    def __init__(self, model: ServedModel, device: str) -> None:
        asked = EmbeddingSettings(precision=model.precision, batch_tokens=model.batch_tokens)
        settings = asked.resolved(device == "cuda")
        self._encoder = Encoder(model.source, settings, device, random_weights=model.random_weights, every_output=True)
        facts, tokenizer = self._encoder.facts, self._encoder.tokenizer
        outputs = {output.name: output.channels for output in facts.outputs if output.per != "pair"}
        if isinstance(tokenizer, EsmSequenceTokenizer) and "logits" in outputs:
            outputs[MASKED] = outputs["logits"]
        if "latents" in outputs:
            outputs[DECODED] = len(VOCABULARY)
        per_residue = [output.name for output in facts.outputs if output.per == "residue"]
        self.about = About(
            name=model.name,
            source=model.source,
            outputs=outputs,
            per_residue=(*per_residue, DECODED, MASKED),
            vocabulary=VOCABULARY if isinstance(tokenizer, EsmSequenceTokenizer) else (),
            labels=(),
            label_kind="",
            one_token_per_residue=tokenizer.one_token_per_residue,
            longest=facts.longest,
            fingerprint=facts.fingerprint,
            device=facts.device_name,
            precision=settings.precision or "fp32",
            batch_tokens=settings.batch_tokens or 0,
            random_weights=facts.random_weights,
        )
        self._special = len(tokenizer.prefix) + len(tokenizer.suffix)
        self._kept = _kept(model.cache, facts.cache_keys)

    def item(self, output: str, payload: Any) -> Item:
        if isinstance(payload, str):
            return Item(output, (output, payload), payload, residues_of(payload) + self._special)
        return Item(output, (output, payload.tobytes()), payload, len(payload))

    def tokens(self, text: str) -> list[int]:
        tokenizer = self._encoder.tokenizer
        return [*tokenizer.prefix, *tokenizer.encode([text])[0].tolist(), *tokenizer.suffix]

    def compute(self, items: Sequence[Item]) -> list[NDArray[np.float32]]:
        return _split_for_memory(self._compute, items)

    @torch.inference_mode()
    def _compute(self, items: Sequence[Item]) -> list[NDArray[np.float32]]:
        results: dict[int, NDArray[np.float32]] = self._known(items)
        latents = [place for place, item in enumerate(items) if item.output == DECODED]
        if latents:
            rows = self._encoder.decode([torch.from_numpy(items[place].payload) for place in latents])
            results |= {place: logits.cpu().numpy() for place, logits in zip(latents, rows, strict=True)}
        texts = [place for place in range(len(items)) if place not in results]
        if texts:
            found = self._rows([items[place] for place in texts])
            results |= dict(zip(texts, found, strict=True))
        return [results[place] for place in range(len(items))]

    def _known(self, items: Sequence[Item]) -> dict[int, NDArray[np.float32]]:
        """Results that embed or training has left in the cache's folder."""
        found = {}
        for output, store in self._kept.items():
            places = [place for place, item in enumerate(items) if item.output == output]
            texts = (items[place].payload for place in places)
            hashes = np.array([xxhash.xxh3_64_intdigest(text.encode("ascii")) for text in texts], dtype=np.uint64)
            there = store.has(hashes)
            for place, rows in zip(np.array(places)[there].tolist(), store.rows(hashes[there]), strict=True):
                found[place] = rows if output in self.about.per_residue else rows[0]
        return found

    def _rows(self, items: Sequence[Item]) -> list[NDArray[np.float32]]:
        batch = self._packed([item.payload for item in items])
        names = {"logits" if item.output == MASKED else item.output for item in items}
        rows = self._encoder.encode(batch.to(self._encoder.device, non_blocking=True), names)
        if not rows.pop("finite"):
            raise DataError(f"{self.about.name} gives NaN or infinity; check its weights, or choose another precision")
        arrays = {name: tensor.float().cpu().numpy() for name, tensor in rows.items()}
        lengths = batch.cu_seqlens.diff().numpy() - self._special
        ends = np.cumsum(lengths)
        masked_R = (batch.tokens == MASK)[batch.target_positions].numpy() if MASKED in self.about.outputs else None
        results = []
        for place, item in enumerate(items):
            span = slice(int(ends[place] - lengths[place]), int(ends[place]))
            if item.output == MASKED:
                assert masked_R is not None
                results.append(arrays["logits"][span][masked_R[span]])
            else:
                results.append(arrays[item.output][span if item.output in self.about.per_residue else place])
        return results

    def _packed(self, texts: list[str]) -> PackedBatch:
        if MASKED not in self.about.outputs or not any("<" in text for text in texts):
            return self._encoder.pack([text.encode("ascii") for text in texts])
        batch = pack_sequences(texts)
        return replace(batch, target_positions=residue_mask(batch, 1, 1).nonzero()[:, 0])


class _ClassifierComputer:
    def __init__(self, model: ServedModel, folder: Path, device: str) -> None:
        precision = model.precision or "fp32"
        tokens = {} if model.batch_tokens is None else {"batch_tokens": model.batch_tokens}
        self._pipeline = pipeline = ClassifierPipeline.load(
            folder, config=config_of(folder), device=device, precision=precision, **tokens
        )
        space = pipeline.label_space
        self.about = About(
            name=model.name,
            source=model.source,
            outputs={CLASSES: space.num_outputs},
            per_residue=(CLASSES,) if pipeline.per_residue else (),
            vocabulary=(),
            labels=tuple(space.names),
            label_kind=space.kind,
            one_token_per_residue=pipeline.tokenizer.one_token_per_residue,
            longest=pipeline.max_length,
            fingerprint=weights_fingerprint(pipeline.model),
            device=torch.cuda.get_device_name(pipeline.device) if device == "cuda" else device,
            precision=precision,
            batch_tokens=pipeline.batch_tokens,
            random_weights=False,
        )

    def item(self, output: str, payload: Any) -> Item:
        return Item(output, (output, payload), payload, int(self._pipeline.token_lengths([payload])[0]))

    def tokens(self, text: str) -> list[int]:
        batch: list[int] = self._pipeline.pack([text]).tokens.tolist()
        return batch

    def compute(self, items: Sequence[Item]) -> list[NDArray[np.float32]]:
        return _split_for_memory(self._compute, items)

    def _compute(self, items: Sequence[Item]) -> list[NDArray[np.float32]]:
        batch = self._pipeline.pack([item.payload for item in items])
        rows = self._pipeline.forward(batch.to(self._pipeline.device)).cpu().numpy()
        if not self._pipeline.per_residue:
            return list(rows)
        tokenizer = self._pipeline.tokenizer
        lengths = batch.cu_seqlens.diff().numpy() - len(tokenizer.prefix) - len(tokenizer.suffix)
        return np.split(rows, np.cumsum(lengths)[:-1])


def _split_for_memory(compute: Any, items: Sequence[Item]) -> list[NDArray[np.float32]]:
    """Results of a batch, in halves where it is out of memory."""
    try:
        found: list[NDArray[np.float32]] = compute(items)
        return found
    except (RuntimeError, MemoryError, ResourceError) as error:
        if not is_out_of_memory(error) and not isinstance(error, ResourceError):
            raise
        if len(items) == 1:
            raise ResourceError(f"out of memory for a sequence of {items[0].tokens:,} tokens") from error
    torch.cuda.empty_cache()
    half = len(items) // 2
    return _split_for_memory(compute, items[:half]) + _split_for_memory(compute, items[half:])


def _kept(folder: str | None, keys: dict[str, str]) -> dict[str, FeatureStore]:
    if folder is None:
        return {}
    stores = {output: FeatureStore(Path(folder).expanduser() / key) for output, key in keys.items()}
    return {output: store for output, store in stores.items() if len(store)}
