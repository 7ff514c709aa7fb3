"""A model as the service computes with it: a batch of items of any outputs to the array of each.

What an item wants costs the others nothing but a layer that they share a pass with.
Shape legend: L residues of a sequence, D channels, K classes or tokens of the vocabulary.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esmeray.common.errors import ConfigError
from esmeray.dataset.embeddings.cache import FeatureStore
from esmeray.dataset.fasta.records import keys_of
from esmeray.dataset.tokens.base import EsmSequenceTokenizer
from esmeray.dataset.tokens.esm import MASK, VOCABULARY
from esmeray.inference.models.kinds import prediction_of
from esmeray.inference.models.model import TokenizedTexts, run
from esmeray.inference.models.opening import open_model
from esmeray.inference.models.outputs.latents import decoded
from esmeray.inference.models.packing import Tokenized
from esmeray.inference.models.source import find_model
from esmeray.model.forward_loop import ForwardLoop, Places
from esmeray.service.contract import DECODED, EACH_MASKED, MASKED, About
from esmeray.service.replicas.batcher import Item
from esmeray.train_config.embed_schema import EmbedSection
from esmeray.train_config.section import DEFAULT_TOKENS
from esmeray.train_config.service_schema import ServedModel


class MaskedPiece(NamedTuple):
    """The ids of a text, of which one will be masked."""

    piece: NDArray[np.int32]
    masked_index: int

    def masked(self) -> NDArray[np.int32]:
        masked = self.piece.copy()
        masked[self.masked_index] = MASK
        return masked


class Computer:
    """The model that the settings name, on a device; raises what opening it raises."""

    def __init__(self, served: ServedModel, device: str) -> None:
        prediction = prediction_of(find_model(served.source, "models").task)
        precision, tokens = served.precision or "fp32", served.tokens or DEFAULT_TOKENS
        if prediction is None:  # the defaults are those of embed, else of the classifier's tools
            settings = EmbedSection(precision=served.precision, tokens=served.tokens).resolved(device == "cuda")
            assert settings.precision is not None and settings.tokens is not None
            precision, tokens = settings.precision, settings.tokens
        self._model = model = open_model(
            served.source, precision, device, random_weights=served.random_weights, key="models"
        )
        for head in model.heads.values():
            refusal = getattr(head, "not_served", "")
            if refusal:
                raise ConfigError(f"models: {served.source}: {refusal.replace('SOURCE', served.source)}")
        outputs = model.outputs(None if prediction is None else [prediction])
        self._outputs = {output.name: output for output in outputs if output.per != "pair"}
        self.about = self._about(served, tokens)
        stores = {}
        if served.cache is not None:
            folder = Path(served.cache).expanduser()
            keys = {name: model.cache_key(output, None, "error 256") for name, output in self._outputs.items()}
            stores = {name: FeatureStore(folder / key) for name, key in keys.items()}
        self._cache = {name: store for name, store in stores.items() if len(store)}

    def items(self, output: str, payloads: Sequence[Any]) -> list[Item]:
        """Items of texts, which are tokenised here and nowhere else, or of latents (L, D)."""
        if output == DECODED:
            return [Item(output, (output, latents.tobytes()), latents, len(latents)) for latents in payloads]
        pieces = self._tokenize(payloads).pieces
        special = self._model.facts.special_tokens
        if output == EACH_MASKED:  # which all share the piece: a request of 1.5 kB would be 8 MB of them
            return [
                Item(MASKED, (output, text, index), MaskedPiece(piece, index), len(piece) + special)
                for text, piece in zip(payloads, pieces, strict=True)
                for index in range(len(piece))
            ]
        return [
            Item(output, (output, text), piece, len(piece) + special, text)
            for text, piece in zip(payloads, pieces, strict=True)
        ]

    def tokens(self, text: str) -> list[int]:
        """Ids of a text, special tokens included."""
        tokenizer = self._model.tokenizer
        return [*tokenizer.prefix, *self._tokenize([text]).pieces[0].tolist(), *tokenizer.suffix]

    def compute(self, items: Sequence[Item]) -> list[NDArray[np.float32]]:
        """The result of each; raises ResourceError where a single one is out of memory, DataError for NaN."""
        results = self._cached(items) | self._decoded(items)
        missing = [place for place in range(len(items)) if place not in results]
        results |= self._computed(items, missing)
        return [results[place] for place in range(len(items))]

    def _tokenize(self, texts: Sequence[str]) -> Tokenized:
        # Only of a model that predicts is a text cropped: for any other the ingress has refused what is too long.
        return self._model.tokenize(texts, *self._model.limit)

    def _cached(self, items: Sequence[Item]) -> dict[int, NDArray[np.float32]]:
        """Results that embed or training has left in the cache's folder."""
        results = {}
        for output, store in self._cache.items():
            places = [place for place, item in enumerate(items) if item.output == output]
            keys_N2 = keys_of(str(items[place].text).encode("ascii") for place in places)
            is_cached = store.has(keys_N2)
            hits = np.array(places)[is_cached].tolist()
            for place, rows in zip(hits, store.rows(keys_N2[is_cached]), strict=True):
                results[place] = rows if self._outputs[output].per == "residue" else rows[0]
        return results

    def _decoded(self, items: Sequence[Item]) -> dict[int, NDArray[np.float32]]:
        results: dict[int, NDArray[np.float32]] = {}
        latents = [place for place, item in enumerate(items) if item.output == DECODED]

        def launch(places: Places) -> dict[str, Tensor]:
            with torch.inference_mode():
                payloads = [torch.from_numpy(items[place].payload) for place in places.tolist()]
                logits = decoded(self._model, payloads)
            return {str(place): rows for place, rows in zip(places.tolist(), logits, strict=True)}

        loop = ForwardLoop(self._model.device, launch, lambda place: f"latents of {items[place].tokens:,} residues")
        for _, tensors in loop.run([np.array(latents)] if latents else []):
            results |= {int(place): rows.numpy() for place, rows in tensors.items()}
        return results

    def _computed(self, items: Sequence[Item], places: Sequence[int]) -> dict[int, NDArray[np.float32]]:
        """Results of texts, all outputs from one pass: the batcher has made the batch."""
        results: dict[int, NDArray[np.float32]] = {}
        if not places:
            return results
        payloads = [items[place].payload for place in places]
        pieces = [payload.masked() if isinstance(payload, MaskedPiece) else payload for payload in payloads]
        kinds = {"logits" if items[place].output == MASKED else items[place].output for place in places}
        outputs = [output for name, output in self._outputs.items() if name in kinds]
        texts = TokenizedTexts(Tokenized(pieces, np.zeros(len(pieces), dtype=np.int64)), self._model)
        for batch in run(self._model, texts, outputs):
            rows = {output.name: batch.by_text(output) for output in outputs}
            for number, text in enumerate(batch.indices.tolist()):
                item = items[places[text]]
                if item.output == MASKED:
                    results[places[text]] = rows["logits"][number][pieces[text] == MASK]
                elif self._outputs[item.output].per == "residue":
                    results[places[text]] = rows[item.output][number]
                else:
                    results[places[text]] = rows[item.output][number][0]
        return results

    def _about(self, served: ServedModel, tokens: int) -> About:
        model, facts = self._model, self._model.facts
        outputs = {name: output.channels for name, output in self._outputs.items()}
        is_esm = isinstance(model.tokenizer, EsmSequenceTokenizer)
        if is_esm and "logits" in outputs:
            outputs[MASKED] = outputs["logits"]
        if "latents" in outputs:
            outputs[DECODED] = len(VOCABULARY)
        space = next((head.label_space for head in model.heads.values() if hasattr(head, "label_space")), None)
        return About(
            name=served.name,
            outputs=outputs,
            vocabulary=VOCABULARY if is_esm and space is None else (),
            labels=() if space is None else tuple(space.names),
            label_kind="" if space is None else space.kind,
            one_token_per_residue=model.tokenizer.one_token_per_residue,
            longest=model.limit.max_length,
            fingerprint=facts.fingerprint,
            device=facts.device_name,
            precision=facts.precision,
            tokens=tokens,
            random_weights=facts.random_weights,
        )
