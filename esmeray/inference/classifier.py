"""Predict classes, numbers or letters for texts with a trained classifier, on any device and in any precision.

Texts are packed under a token budget, longest first, so that an out-of-memory error occurs early. Shape legend: N
texts, C classes or numbers, R residues of all texts.
"""

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import compress
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from esmeray.dataset.batches.preparation import FixedCrop, head_length
from esmeray.dataset.section import DataSection
from esmeray.dataset.sequence_list import clean_list
from esmeray.dataset.targets import LabelSpace, predicted_positive
from esmeray.inference.calibration import CALIBRATION_FILE, Calibration, thresholds_of
from esmeray.inference.models.model import Model, TokenizedTexts, limited, run
from esmeray.inference.models.opening import open_model
from esmeray.inference.models.source import exported_by, limit_of
from esmeray.tasks.classifier.model import Classifier
from esmeray.tasks.plan import check_length
from esmeray.train_config.section import DEFAULT_TOKENS, ComputeSection, Precision, Stream, Weights

UNSEEN_RESIDUE = "?"
"""Letter of a cropped residue; ignored as a target."""


@dataclass(frozen=True)
class Predictions:
    """Predictions for N texts, in their order.

    Attributes:
        label_space: meaning of the columns.
        probabilities: (N, C) fp32; predicted numbers for regression. (R, C) for per_residue, with residues
            concatenated.
        lengths: (N,) int64, rows per text for per_residue; otherwise None.
        cropped: (N,) int64, tokens per text beyond the pipeline's limit, which were left out.
        crop: part of a longer text that is kept.
        thresholds: (1,) maximum of 1 - probability in a conformal set, or (C,) half the width of the intervals of
            numbers; None without a coverage.
    """

    label_space: LabelSpace
    probabilities: NDArray[np.float32]
    lengths: NDArray[np.int64] | None
    cropped: NDArray[np.int64]
    crop: FixedCrop = "start"
    thresholds: NDArray[np.float64] | None = None

    def __len__(self) -> int:
        return self.cropped.size

    def labels(self, separator: str = ";") -> list[str]:
        """Return the prediction of each text in words.

        - multiclass and binary: the likeliest name
        - multilabel: names with a probability above 0.5
        - per_residue: a letter per residue, :data:`UNSEEN_RESIDUE` if it was cropped
        - regression: the numbers
        """
        names, kind = self.label_space.names, self.label_space.kind
        if kind == "regression":
            return [separator.join(f"{value:.6g}" for value in row) for row in self.probabilities.tolist()]
        if kind == "multilabel":
            # The same function as in the metrics, so that a probability of exactly 0.5 has the same result here and in
            # the report.
            return [separator.join(compress(names, row)) for row in predicted_positive(self.probabilities)]
        likeliest = self.probabilities.argmax(-1).tolist()
        if kind != "per_residue":
            return [names[index] for index in likeliest]
        # One letter each (U1), so that the number of letters equals the number of residues.
        letters = np.array([names[index] for index in likeliest], dtype="<U1")
        return ["".join(text) for text in self.of_whole_texts(letters, UNSEEN_RESIDUE)]

    def sets(self) -> list[list[str]]:
        """Return the names in the conformal set of each text, or of each residue of all texts that was not cropped."""
        assert self.thresholds is not None, "only with a coverage"
        contained_RC = 1 - self.probabilities <= self.thresholds
        return [list(compress(self.label_space.names, row)) for row in contained_RC.tolist()]

    def kept_residues(self) -> NDArray[np.bool_] | None:
        """(residues of the whole texts,) true for residues with a prediction; None if predictions are per text."""
        if self.lengths is None:
            return None
        # Three runs per text: its start, the cropped part, and its end, which may be empty.
        heads_N = np.array([head_length(kept, self.crop) for kept in self.lengths.tolist()], dtype=np.int64)
        sizes_N3 = np.stack([heads_N, self.cropped, self.lengths - heads_N], axis=1)
        return np.repeat(np.tile([True, False, True], len(self)), sizes_N3.ravel())

    def of_whole_texts(self, values_R: NDArray, missing: str | float) -> list[NDArray]:
        """Values (R, ...) of each text's residues, with ``missing`` for cropped ones, for per_residue."""
        kept = self.kept_residues()
        assert kept is not None and self.lengths is not None
        whole = np.full((kept.size, *values_R.shape[1:]), missing, dtype=values_R.dtype)
        whole[kept] = values_R
        return np.split(whole, np.cumsum(self.lengths + self.cropped))[: len(self)]


@dataclass
class ClassifierPipeline:
    """A trained classifier of texts.

    Args:
        model: model with a classifier head.
        tokens: token budget of a batch, special tokens included; a longer text has its own batch.
        max_length, crop: maximum tokens of a text, without special tokens, and the part of a longer text to keep.
        calibration: calibrates the probabilities; None for the model's own.
        thresholds: thresholds of the predictions' sets; None for no sets.
    """

    model: Model
    _: KW_ONLY
    tokens: int = DEFAULT_TOKENS
    max_length: int | None = None
    crop: FixedCrop = "start"
    calibration: Calibration | None = None
    thresholds: NDArray[np.float64] | None = None

    @classmethod
    def load(
        cls,
        source: str | Path,
        *,
        data: DataSection | None = None,
        device: torch.device | str | None = None,
        precision: Precision = "fp32",
        tokens: int = DEFAULT_TOKENS,
        stream: Stream = "auto",
        weights: Weights = "stored",
        calibrated: bool = True,
        coverage: float | None = None,
    ) -> "ClassifierPipeline":
        """Load a classifier from an export, or from a run that exported one at its end.

        Length limit and crop come from ``data``, by default from the folder's settings. Probabilities are calibrated if
        the folder has a calibration and ``calibrated`` is true. With a ``coverage``, predictions have conformal sets.
        Raises ConfigError if there is no classifier, no such device or no calibration for the coverage, DataError if
        its files are damaged.

        >>> classifier = esmeray.ClassifierPipeline.load("classifier", device="cpu")
        >>> classifier.predict(["MKTAYIAKQR", "MSILVTRPSP"]).probabilities.shape  # (N, classes)
        (2, 3)
        """
        tokens = ComputeSection.of(tokens=tokens).tokens or DEFAULT_TOKENS
        # With its own length limit a tool can use more of a text than training did; by default both are the same.
        folder = exported_by("classifier", source)
        model = open_model(folder, precision, device, stream=stream, weights=weights)
        calibration = Calibration.load(folder / CALIBRATION_FILE, model.facts.fingerprint) if calibrated else None
        limit = model.limit
        if data is not None:
            check_length(data, model.backbone.longest, model.facts.special_tokens, 0)
            limit = limited(limit_of(data), model.facts.longest)
        return cls(
            model,
            tokens=tokens,
            max_length=limit.max_length,
            crop=limit.crop,
            calibration=calibration,
            thresholds=None if coverage is None else thresholds_of(calibration, coverage),
        )

    @property
    def classifier(self) -> Classifier:
        return self.model.heads["classifier"]

    @property
    def label_space(self) -> LabelSpace:
        return self.classifier.label_space

    def predict(
        self, texts: Sequence[str], *, progress: Callable[[int, int], None] = lambda done, total: None
    ) -> Predictions:
        """Predict the probabilities of each text, in order.

        ``progress`` gets the number of finished texts and the total.

        Proteins are cleaned as in commands, with a warning that counts the changes and the residues that the vocabulary
        lacks.

        Raises ConfigError if ``texts`` is not a list, DataError for an invalid text or NaN. Raises ResourceError if a
        single text is out of memory.
        """
        cleaned = clean_list(texts, "texts", self.model.content)
        self.model.facts.unknown.warn(cleaned)
        return self.predict_clean(cleaned, progress=progress)

    def predict_clean(
        self, texts: Sequence[str], *, progress: Callable[[int, int], None] = lambda done, total: None
    ) -> Predictions:
        """:meth:`predict` for texts read from a file or a store, which are already clean."""
        tokenized = self.model.tokenize(texts, self.max_length, self.crop)
        self.model.facts.unknown.report(texts)  # raises if there are too many
        widths_N = tokenized.lengths if self.classifier.per_residue else np.ones(len(texts), dtype=np.int64)
        ends_N = np.cumsum(widths_N)
        result = np.empty((int(widths_N.sum()), self.label_space.num_outputs), dtype=np.float32)
        # Written to each text's position, because batches are sorted longest first, and results are as large as the
        # input.
        done, outputs = 0, self.model.outputs(["classes"])
        for batch in run(self.model, TokenizedTexts(tokenized, self.model), outputs, self.tokens):
            for index, rows in zip(batch.indices.tolist(), batch.by_text(outputs[0]), strict=True):
                result[ends_N[index] - widths_N[index] : ends_N[index]] = rows
            done += batch.indices.size
            progress(done, len(texts))
        return Predictions(
            self.label_space,
            result if self.calibration is None else self.calibration.probabilities(result),
            lengths=tokenized.lengths if self.classifier.per_residue else None,
            cropped=tokenized.cropped,
            crop=self.crop,
            thresholds=self.thresholds,
        )
