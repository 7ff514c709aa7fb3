"""Model of a replica: computes a batch of items that request different outputs.

Requests for different outputs share one forward pass.
Shape legend: L residues of a sequence, D channels, K classes or tokens of the vocabulary.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import log_softmax

from esmeray.common.errors import expanded
from esmeray.dataset.embeddings.cache import FeatureStore
from esmeray.dataset.fasta.records import keys_of
from esmeray.dataset.tokens.esm import VOCABULARY
from esmeray.inference.calibration import CALIBRATION_FILE, Calibration
from esmeray.inference.models.kinds import prediction_of
from esmeray.inference.models.masking import scored_positions, summed
from esmeray.inference.models.model import TokenizedTexts, run
from esmeray.inference.models.opening import open_model
from esmeray.inference.models.outputs.latents import decoded
from esmeray.inference.models.packing import Tokenized
from esmeray.inference.models.source import find_model
from esmeray.model.forward_loop import ForwardLoop, Indices, one_by_one
from esmeray.service.contract import CLASSES, DECODED, EACH_MASKED, LIKELIHOOD, MASKED, About
from esmeray.service.replicas.batcher import Item
from esmeray.service.section import ServedModel
from esmeray.train_config.section import DEFAULT_TOKENS, ComputeSection


class MaskedPiece(NamedTuple):
    """Token ids of a text, and the index of the token to mask."""

    piece: NDArray[np.int32]
    masked_index: int

    def masked(self, mask: int) -> NDArray[np.int32]:
        masked = self.piece.copy()
        masked[self.masked_index] = mask
        return masked


class Computer:
    """Served model on a device. The constructor raises the errors of :func:`open_model`."""

    def __init__(self, served: ServedModel, device: str) -> None:
        located = find_model(served.source, "models")
        prediction = prediction_of(located.task)
        precision = served.precision or "fp32"
        tokens = served.tokens or DEFAULT_TOKENS
        if prediction is None:  # use the defaults of embed; classifiers have their own
            section = ComputeSection(precision=served.precision, tokens=served.tokens)
            precision, tokens = section.resolved(device == "cuda")
        self._model = model = open_model(
            served.source,
            precision,
            device,
            random_weights=served.random_weights,
            equal_bytes=served.equal_bytes,
            key="models",
        )
        outputs = model.outputs(None if prediction is None else [prediction])
        # Outputs per pair are only for jobs: the pairs of 50,000 residues would take 10 GB.
        self._outputs = {output.name: output for output in outputs if output.per != "pair"}
        self._calibration = Calibration.load(located.folder / CALIBRATION_FILE, model.facts.fingerprint)
        self.about = self._about(served, tokens)
        self._cache: dict[str, FeatureStore] = {}
        if served.cache is not None:
            folder = expanded(served.cache)
            for name, output in self._outputs.items():
                # The key of a job with embed's defaults, which does not crop sequences either.
                store = FeatureStore(folder / model.cache_key(output, None, "error 256"))
                if len(store):  # skip empty ones, which would be searched for each batch
                    self._cache[name] = store

    def items(self, output: str, payloads: Sequence[Any]) -> list[Item]:
        """Return an item per text, which is tokenized here, or per latents (L, D)."""
        # Keys hold the text, not the token ids: one byte per residue instead of four.
        if output == DECODED:
            return [Item(output, (output, latents.tobytes()), latents, len(latents)) for latents in payloads]
        pieces = self._tokenize(payloads).pieces
        special = self._model.facts.special_tokens
        # Share the piece: copies would turn a request of 1.5 kB into 8 MB.
        if output in (EACH_MASKED, LIKELIHOOD):
            return [
                Item(MASKED, (EACH_MASKED, text, index), MaskedPiece(piece, index), len(piece) + special)
                for text, piece in zip(payloads, pieces, strict=True)
                for index in range(len(piece))
            ]
        return [
            Item(output, (output, text), piece, len(piece) + special, text)
            for text, piece in zip(payloads, pieces, strict=True)
        ]

    def likelihoods(self, texts: Sequence[str], logits: Sequence[NDArray[np.float32]]) -> list[NDArray[np.float32]]:
        """Return (3,) pseudo-log-likelihoods of each text, from the results of the items of that output."""
        positions_M4 = scored_positions(self._model, self._tokenize(texts))
        logs_MK = log_softmax(np.concatenate(logits)[positions_M4[:, 2]].astype(np.float64), axis=1)
        return [*summed(self._model, positions_M4, logs_MK, len(texts)).astype(np.float32)]

    def tokens(self, text: str) -> list[int]:
        """Return the token ids of a text, including special tokens."""
        tokenizer = self._model.tokenizer
        return [*tokenizer.prefix, *self._tokenize([text]).pieces[0].tolist(), *tokenizer.suffix]

    def compute(self, items: Sequence[Item]) -> list[NDArray[np.float32]]:
        """Return the result of each item. Raises ResourceError if one item is out of memory, DataError for NaN."""
        results = self._cached(items) | self._decoded(items)
        results |= self._computed(items, [index for index in range(len(items)) if index not in results])
        return [results[index] for index in range(len(items))]

    def _tokenize(self, texts: Sequence[str]) -> Tokenized:
        # Crops only for models that predict. For others the ingress has refused sequences that are too long.
        return self._model.tokenize(texts, *self._model.limit)

    def _cached(self, items: Sequence[Item]) -> dict[int, NDArray[np.float32]]:
        """Return results from the cache folder, which embed or training has written."""
        results: dict[int, NDArray[np.float32]] = {}
        for output, store in self._cache.items():
            indices = [index for index, item in enumerate(items) if item.output == output]
            keys_N2 = keys_of(items[index].text.encode("ascii") for index in indices)
            is_cached = store.has(keys_N2)
            hits = zip(np.array(indices)[is_cached].tolist(), store.rows(keys_N2[is_cached]), strict=True)
            results |= {index: self._result(output, rows) for index, rows in hits}
        return results

    def _result(self, output: str, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return rows of residues (L, C) as they are, and the only row of a protein as a vector (C,)."""
        if output == CLASSES and self._calibration is not None:
            rows = self._calibration.probabilities(rows)
        return rows if self._outputs[output].per == "residue" else rows[0]

    def _decoded(self, items: Sequence[Item]) -> dict[int, NDArray[np.float32]]:
        latents = [index for index, item in enumerate(items) if item.output == DECODED]
        if not latents:
            return {}

        def launch(indices: Indices) -> dict[str, torch.Tensor]:
            with torch.inference_mode():
                logits = decoded(self._model, [torch.from_numpy(items[index].payload) for index in indices.tolist()])
            return dict(zip(map(str, indices.tolist()), logits, strict=True))

        # The loop of inference halves a batch that is out of memory.
        loop = ForwardLoop(
            self._model.device, one_by_one(launch), lambda index: f"latents of {items[index].tokens:,} residues"
        )
        batches = loop.run([np.array(latents)])
        return {int(index): rows.numpy() for _, tensors in batches for index, rows in tensors.items()}

    def _computed(self, items: Sequence[Item], indices: Sequence[int]) -> dict[int, NDArray[np.float32]]:
        """Return the results of texts, with all outputs from one forward pass."""
        if not indices:
            return {}
        results: dict[int, NDArray[np.float32]] = {}
        pending = [items[index] for index in indices]
        mask = self._model.tokenizer.mask or 0  # without a mask token no output needs it
        payloads = [item.payload for item in pending]
        pieces = [payload.masked(mask) if isinstance(payload, MaskedPiece) else payload for payload in payloads]
        # Results for masked positions are rows of the logits.
        names = {"logits" if item.output == MASKED else item.output for item in pending}
        outputs = [output for name, output in self._outputs.items() if name in names]
        texts = TokenizedTexts(Tokenized(pieces, np.zeros(len(pieces), dtype=np.int64)), self._model)
        for batch in run(self._model, texts, outputs):
            rows = {output.name: batch.by_text(output) for output in outputs}
            # In the order of this batch, which is a part of ours after running out memory.
            for number, text in enumerate(batch.indices.tolist()):
                output = pending[text].output
                if output == MASKED:
                    result = rows["logits"][number][pieces[text] == mask]
                else:
                    result = self._result(output, rows[output][number])
                results[indices[text]] = result
        return results

    def _about(self, served: ServedModel, tokens: int) -> About:
        model, facts = self._model, self._model.facts
        outputs = {name: output.channels for name, output in self._outputs.items()}
        spaces = {name: model.space(output) for name, output in self._outputs.items()}
        if CLASSES in spaces and self._calibration is not None:  # embed run writes probabilities as they are
            spaces[CLASSES] += f" calibrated, temperature {self._calibration.temperature}"
        tokenizer = model.tokenizer
        if "logits" in outputs and tokenizer.mask is not None:
            outputs[MASKED] = outputs["logits"]
        if "latents" in outputs:
            outputs[DECODED] = len(VOCABULARY)
        space = next((head.label_space for head in model.heads.values() if hasattr(head, "label_space")), None)
        return About(
            name=served.name,
            outputs=outputs,
            vocabulary=tokenizer.tokens if tokenizer.one_token_per_residue and space is None else (),
            labels=() if space is None else tuple(space.names),
            label_kind="" if space is None else space.kind,
            one_token_per_residue=tokenizer.one_token_per_residue,
            longest=model.limit.max_length,
            fingerprint=facts.fingerprint,
            device=facts.device_name,
            precision=facts.precision,
            tokens=tokens,
            random_weights=facts.random_weights,
            spaces=spaces,
            unknown=facts.unknown,
            calibration=self._calibration,
        )
