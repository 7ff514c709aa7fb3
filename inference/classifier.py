"""Texts to classes, numbers or letters by a trained classifier, on any device and in any precision.

Probabilities come in the order of the texts, whatever shares a batch. Texts are sorted by length and packed to a token
budget, longest first, so that memory runs out at the start or not at all.

Shape legend: N texts, C classes or numbers, T tokens of a batch, R residues of all texts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.errors import ResourceError
from dataset.batches.cropping import FixedCrop, fixed_crop, head_length
from dataset.batches.plan import longest_first
from dataset.labels.label_space import LabelSpace, predicted_positive
from dataset.packed_batch import PackedBatch
from dataset.tokens.base import SequenceTokenizer
from dataset.tokens.esm import packed_from_tokens
from inference.exported import PipelineOptions, config_of, model_folder
from model.backbones.lora import merge
from model.device import DTYPES, check_device
from model.export.classifier import load_classifier
from model.tasks.classifier import Classifier
from model.tasks.losses import probabilities
from model.tasks.pooling import residue_mask
from train_config.schema import Config
from train_config.section import Precision

Progress: TypeAlias = Callable[[int, int], None]
"""Called with how many texts are done and how many there are."""

DEFAULT_BATCH_TOKENS = 8192

UNSEEN_RESIDUE = "?"
"""Letter of a residue that was cropped; as a target it is ignored."""


@dataclass(frozen=True)
class Predictions:
    """Predictions of N texts, in their order.

    Attributes:
        label_space: what the columns mean.
        probabilities: (N, C) fp32; numbers themselves for regression. For per_residue (R, C), residues end to end.
        lengths: (N,) int64, rows of each text for per_residue; else None.
        cropped: (N,) int64, tokens of each text that were left out because it is longer than the pipeline's limit.
        crop: which these are.
    """

    label_space: LabelSpace
    probabilities: NDArray[np.float32]
    lengths: NDArray[np.int64] | None
    cropped: NDArray[np.int64]
    crop: FixedCrop = "start"

    def __len__(self) -> int:
        return self.cropped.size

    def labels(self, separator: str = ";") -> list[str]:
        """The prediction of each text in words.

        multiclass and binary: the likeliest name; multilabel: names of a probability above 0.5; per_residue: a letter
        for each residue, :data:`UNSEEN_RESIDUE` where it was cropped; regression: the numbers.
        """
        names, kind = self.label_space.names, self.label_space.kind
        if kind == "regression":
            return [separator.join(f"{value:.6g}" for value in row) for row in self.probabilities.tolist()]
        if kind == "multilabel":
            rows = predicted_positive(self.probabilities).tolist()
            return [separator.join(name for name, on in zip(names, row, strict=True) if on) for row in rows]
        likeliest = self.probabilities.argmax(-1).tolist()
        if kind != "per_residue":
            return [names[index] for index in likeliest]
        letters = np.array([names[index] for index in likeliest], dtype="<U1")
        return ["".join(text) for text in self.of_whole_texts(letters, UNSEEN_RESIDUE)]

    def kept_residues(self) -> NDArray[np.bool_] | None:
        """(residues of the whole texts,) which have a prediction; None where a text has one, not its residues."""
        if self.lengths is None:
            return None
        pieces = [np.ones(0, bool)]
        for kept, cut in zip(self.lengths.tolist(), self.cropped.tolist(), strict=True):
            head = head_length(kept, self.crop)
            pieces += [np.ones(head, bool), np.zeros(cut, bool), np.ones(kept - head, bool)]
        return np.concatenate(pieces)

    def of_whole_texts(self, values_R: NDArray, missing: str | float) -> list[NDArray]:
        """The values (R, ...) of each text's residues, with ``missing`` where one was cropped, for per_residue."""
        kept = self.kept_residues()
        assert kept is not None and self.lengths is not None
        whole = np.full((kept.size, *values_R.shape[1:]), missing, dtype=values_R.dtype)
        whole[kept] = values_R
        return np.split(whole, np.cumsum(self.lengths + self.cropped))[: len(self)]


@dataclass(frozen=True)
class _Encoded:
    """Tokens of N texts end to end, the end of each, its length and the number of its tokens that are used."""

    tokens: NDArray[np.int32]
    ends: NDArray[np.int64]
    whole: NDArray[np.int64]
    kept: NDArray[np.int64]


class ClassifierPipeline:
    """A trained classifier of texts, which takes the model over: merges its adapter, casts and moves its weights.

    The device is cpu, cuda, cuda:1 ...; by default CUDA where there is one. Weights and computation have ``precision``,
    probabilities are fp32. ``batch_tokens`` is the budget of a batch, special tokens included; a longer text goes
    alone. Texts of more than ``max_length`` tokens, special ones left out, are cropped as ``crop`` says, and counted.
    """

    def __init__(
        self,
        model: Classifier,
        tokenizer: SequenceTokenizer,
        *,
        device: torch.device | str | None = None,
        precision: Precision = "fp32",
        batch_tokens: int = DEFAULT_BATCH_TOKENS,
        max_length: int | None = None,
        crop: FixedCrop = "start",
    ) -> None:
        merge(model.backbone)
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.precision: Precision = precision
        self.tokenizer = tokenizer
        self.batch_tokens = batch_tokens
        self.max_length, self.crop = max_length, crop
        for parameter in model.parameters():  # not buffers: frequencies of rotary positions need their precision
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(DTYPES[precision])
        self.model = model.requires_grad_(False).eval().to(self.device)
        self._prefix = np.asarray(tokenizer.prefix, dtype=np.int32)
        self._suffix = np.asarray(tokenizer.suffix, dtype=np.int32)

    @classmethod
    def of(cls, options: PipelineOptions, config: Config) -> ClassifierPipeline:
        """The classifier that a tool's options name, with the settings of ``config``; raises as :meth:`load` does."""
        return cls.load(
            options.model,
            config=config,
            device=options.device,
            precision=options.precision,
            batch_tokens=options.batch_tokens,
        )

    @classmethod
    def load(
        cls,
        source: str | Path,
        *,
        config: Config | None = None,
        device: torch.device | str | None = None,
        precision: Precision = "fp32",
        batch_tokens: int = DEFAULT_BATCH_TOKENS,
    ) -> ClassifierPipeline:
        """The classifier that was exported to a folder, or that a run exported at its end.

        The length limit and crop are those of ``config``, by default the folder's own. Raises ConfigError where there
        is no classifier or no such device, DataError where its files are damaged.
        """
        folder = model_folder(source)
        if device is not None:
            check_device(device)
        model, tokenizer = load_classifier(folder)
        data = (config or config_of(folder)).data
        return cls(
            model,
            tokenizer,
            device=device,
            precision=precision,
            batch_tokens=batch_tokens,
            max_length=data.max_length,
            crop=fixed_crop(data.crop),
        )

    @property
    def label_space(self) -> LabelSpace:
        """Kind and names of the outputs."""
        return self.model.label_space

    @property
    def per_residue(self) -> bool:
        """True where each residue has a prediction of its own."""
        return self.label_space.kind == "per_residue"

    def predict(self, texts: Sequence[str], *, progress: Progress | None = None) -> Predictions:
        """Probabilities of each text, in the order given; raises ResourceError where the device is out of memory."""
        encoded = self._encode(texts)
        kept_N = encoded.kept
        widths_N = kept_N if self.per_residue else np.ones_like(kept_N)
        places_N = np.cumsum(widths_N) - widths_N
        result = np.empty((int(widths_N.sum()), self.label_space.num_outputs), dtype=np.float32)
        done = 0
        for records, rows in self._computed(encoded):
            result[_rows_of(places_N[records], widths_N[records])] = rows
            done += records.size
            if progress is not None:
                progress(done, len(texts))
        lengths_N = kept_N if self.per_residue else None
        return Predictions(self.label_space, result, lengths_N, encoded.whole - kept_N, self.crop)

    def pack(self, texts: Sequence[str]) -> PackedBatch:
        """These texts as one batch on the CPU, in their order."""
        encoded = self._encode(texts)
        return self._pack(encoded, np.arange(encoded.kept.size))

    def token_lengths(self, texts: Sequence[str]) -> NDArray[np.int64]:
        """(N,) tokens that each text takes of a budget, special ones included."""
        return self._encode(texts).kept + self._prefix.size + self._suffix.size

    @torch.inference_mode()
    def forward(self, batch: PackedBatch) -> Tensor:
        """(N, C) fp32 on the device, or (R, C) for per_residue: probabilities of a batch that lies on it."""
        try:
            logits = self.model.logits(batch)
        except torch.OutOfMemoryError as error:
            raise ResourceError(
                f"{self.device} is out of memory for a batch of {batch.num_tokens} tokens ({batch.num_sequences} "
                f"texts, the longest of {batch.max_seqlen}); lower --batch-tokens"
            ) from error
        if self.per_residue:
            logits = logits[residue_mask(batch, self._prefix.size, self._suffix.size)]
        return probabilities(logits.float(), self.label_space.kind)

    def _computed(self, encoded: _Encoded) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32]]]:
        """Texts of each batch and their rows; the device computes the next batch while one is fetched from it."""
        launched: list[tuple[NDArray[np.int64], Tensor]] = []
        for records in longest_first(encoded.kept + self._prefix.size + self._suffix.size, self.batch_tokens):
            batch = self._pack(encoded, records)
            launched.append((records, self.forward(batch.to(self.device, non_blocking=True))))
            if len(launched) > 1:
                earlier, rows = launched.pop(0)
                yield earlier, rows.cpu().numpy()
        for records, rows in launched:
            yield records, rows.cpu().numpy()

    def _pack(self, encoded: _Encoded, records: NDArray[np.int64]) -> PackedBatch:
        tokens, columns = encoded.tokens, (encoded.ends, encoded.whole, encoded.kept)
        pieces: list[NDArray[np.int32]] = []
        for end, whole, kept in zip(*(column[records].tolist() for column in columns), strict=True):
            start, head = end - whole, head_length(kept, self.crop) if kept < whole else kept
            pieces += [self._prefix, tokens[start : start + head], tokens[end - (kept - head) : end], self._suffix]
        return packed_from_tokens(np.concatenate(pieces), encoded.kept[records] + self._prefix.size + self._suffix.size)

    def _encode(self, texts: Sequence[str]) -> _Encoded:
        tokens, whole = self.tokenizer.encode(texts)
        kept = whole if self.max_length is None else np.minimum(whole, self.max_length)
        return _Encoded(tokens, np.cumsum(whole), whole, kept)


def _rows_of(places: NDArray[np.int64], widths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Indices of the rows from each place on, as many as its width, end to end."""
    ends = np.cumsum(widths)
    return np.arange(int(ends[-1])) + np.repeat(places - (ends - widths), widths)
