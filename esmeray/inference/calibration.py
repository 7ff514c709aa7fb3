"""Calibration of a classifier on held-out records: probabilities that mean what they say, and sets with a guarantee.

Temperature scaling (Guo et al. 2017) divides the logits by one number, which changes no predicted label. A conformal
set (Angelopoulos and Bates 2023) contains on average at least the chosen share of a record's true labels, if the record
is exchangeable with the n calibrating records. The nonconformity of a label is 1 - probability, which gives the
smallest sets (Sadinle et al. 2019), and of a number its absolute error, so that its set is an interval.

The true labels of a record, such as the classes of its residues, are not independent: they share its weight 1 / (n + 1)
(hierarchical conformal prediction: Lee et al. 2023).

Shape legend: R rows (records, or residues of all records), C classes, labels or columns, I true labels of all rows.
"""

import math
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat
from scipy.optimize import minimize_scalar
from scipy.special import expit, log_softmax, softmax

from esmeray.common.errors import ConfigError, DataError
from esmeray.dataset.section import TargetKind
from esmeray.dataset.targets import has_target
from esmeray.model.export.exported_folder import read_settings_of, write_settings

CALIBRATION_FILE = "calibration.json"
COVERAGE = 0.9
"""Coverage that an evaluation reports."""
HELD_OUT = (
    "sets are calibrated with the run's held-out records: their coverage holds for records exchangeable with these; "
    "for others, calibrate with records like them: --evaluate.calibrate true --evaluate.input FILE"
)
_REMEDY = "calibrate it: esmeray classify evaluate (or function evaluate) MODEL --evaluate.calibrate true"
_LEVELS = 1000
"""Thresholds are stored for coverages in steps of 1 / _LEVELS."""
_FLOOR = 1e-8
"""Smallest probability whose logarithm is taken. 1 - p of a fp32 probability has no smaller values."""


class Calibration(BaseModel):
    """Content of calibration.json.

    Attributes:
        records: number of calibrating records.
        thresholds: largest nonconformity in a set, for coverages of 0.001, 0.002 ... up to n / (n + 1): one list, for
            regression one per column, for terms one per group of proteins.
        temperature: divisor of the logits; 1 for regression.
        shift: added to the divided logits of terms.
        fingerprint: identity of the model that was calibrated.
        held_out: True if the records are the run's own held-out ones.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: TargetKind
    records: int
    thresholds: list[list[FiniteFloat]] = Field(default=[[]], min_length=1)
    temperature: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    shift: FiniteFloat = 0.0
    fingerprint: str = ""
    held_out: bool = False

    @classmethod
    def load(cls, path: Path, fingerprint: str) -> "Calibration | None":
        """Load a calibration; None without the file. Raises DataError if it is damaged, or belongs to other weights."""
        if not path.is_file():
            return None
        calibration = read_settings_of(path, "calibration", cls.model_validate)
        if calibration.fingerprint != fingerprint:
            raise DataError(f"{path}: belongs to other weights than this model; {_REMEDY}")
        return calibration

    def save(self, path: Path) -> None:
        path.unlink(missing_ok=True)  # in a grown folder, a hard link to the previous calibration
        write_settings(path, self.model_dump())

    def probabilities(self, predicted_RC: NDArray) -> NDArray[np.float32]:
        """Return (R, C) calibrated probabilities; numbers stay as they are."""
        if self.kind == "regression":
            return predicted_RC
        logits = _logits(self.kind, predicted_RC) / self.temperature
        if self.kind == "multilabel":
            return expit(logits[..., 1] - logits[..., 0] + self.shift).astype(np.float32)
        return softmax(logits, axis=-1).astype(np.float32)


def thresholds_of(calibration: Calibration | None, coverage: float) -> NDArray[np.float64]:
    """Return the largest nonconformity in a set, one for each list of thresholds.

    Raises ConfigError if the model is not calibrated, or by too few records for this coverage.
    """
    if calibration is None:
        raise ConfigError(f"coverage {coverage}: the model is not calibrated; {_REMEDY}")
    level = math.ceil(coverage * _LEVELS - 1e-6)
    reached = min(map(len, calibration.thresholds))
    if level > reached:
        needed = math.ceil(coverage / (1 - coverage) - 1e-6)
        raise ConfigError(
            f"coverage {coverage}: the calibration with {calibration.records:,} records reaches at most "
            f"{reached / _LEVELS}; lower it, or calibrate with more records (at least {needed:,} with a target)"
        )
    return np.array([values[level - 1] for values in calibration.thresholds])


def fit(kind: TargetKind, predicted_RC: NDArray, targets: NDArray, records_R: NDArray, fingerprint: str) -> Calibration:
    """Calibrate with predictions and targets of held-out records; ``records_R`` is the record of each row.

    Raises ConfigError if they are too few for sets of COVERAGE.
    """
    known = has_target(targets)
    predicted_RC, targets, records_R = predicted_RC[known], targets[known], records_R[known]
    temperature = 1.0 if kind == "regression" else _temperature(kind, predicted_RC, targets)
    records = len(np.unique(records_R))
    calibration = Calibration(kind=kind, records=records, temperature=temperature, fingerprint=fingerprint)
    scores_RC = _nonconformity(kind, calibration.probabilities(predicted_RC), targets)
    truth_RC = _true_labels(kind, targets, scores_RC.shape[1])
    # Columns of numbers have different units, so each has its own thresholds.
    columns = np.arange(scores_RC.shape[1])
    groups = [truth_RC & (columns == column) for column in columns] if kind == "regression" else [truth_RC]
    thresholds = [quantiles(scores_RC[mask_RC], records_R[np.nonzero(mask_RC)[0]]) for mask_RC in groups]
    calibration = calibration.model_copy(update={"thresholds": thresholds})
    thresholds_of(calibration, COVERAGE)
    return calibration


def set_metrics(
    calibration: Calibration, calibrated_RC: NDArray, targets: NDArray, records_R: NDArray
) -> dict[str, float]:
    """Return the coverage and the mean size of sets of COVERAGE, over the records with a true label."""
    kind = calibration.kind
    contained_RC = _nonconformity(kind, calibrated_RC, targets) <= thresholds_of(calibration, COVERAGE)
    truth_RC = _true_labels(kind, targets, calibrated_RC.shape[1])
    counts = (contained_RC & truth_RC, truth_RC, contained_RC, np.ones((len(truth_RC), 1)))
    covered_N, true_N, sizes_N, rows_N = (np.bincount(records_R, values.sum(axis=1)) for values in counts)
    known_N = true_N > 0
    if not known_N.any():
        return {}
    coverage = {f"coverage_of_{COVERAGE}": float((covered_N[known_N] / true_N[known_N]).mean())}
    # The set of a number is an interval.
    size = {} if kind == "regression" else {"set_size": float((sizes_N[known_N] / rows_N[known_N]).mean())}
    return coverage | size


def _nonconformity(kind: TargetKind, calibrated_RC: NDArray, targets: NDArray) -> NDArray:
    """Return (R, C) nonconformity of every label, or of the measured numbers."""
    return np.abs(calibrated_RC - targets) if kind == "regression" else 1 - calibrated_RC


def _true_labels(kind: TargetKind, targets: NDArray, columns: int) -> NDArray[np.bool_]:
    """Return (R, C) True for true labels, or known numbers."""
    if kind == "regression":
        return np.isfinite(targets)
    return targets == 1 if kind == "multilabel" else targets[:, None] == np.arange(columns)


def quantiles(scores_I: NDArray, records_I: NDArray) -> list[float]:
    """Return the smallest score that reaches each coverage, with the correction for finite samples."""
    _, record_I, labels_n = np.unique(records_I, return_inverse=True, return_counts=True)
    order_I = np.argsort(scores_I, kind="stable")
    # One further record, the one to predict, could have any score.
    reached_I = np.cumsum(1 / labels_n[record_I[order_I]]) / (len(labels_n) + 1)
    first = np.searchsorted(reached_I, np.arange(1, _LEVELS) / _LEVELS - 1e-9)
    return scores_I[order_I[first[first < len(order_I)]]].astype(float).tolist()


def _logits(kind: TargetKind, predicted_RC: NDArray) -> NDArray:
    """Logits up to a constant: (R, C), or (R, C, 2) for labels that are false or true."""
    shares = predicted_RC.astype(np.float64)
    if kind == "multilabel":
        shares = np.stack([1 - shares, shares], axis=-1)
    return np.log(np.maximum(shares, _FLOOR))


def _temperature(kind: TargetKind, predicted_RC: NDArray, targets: NDArray) -> float:
    """The temperature with the highest likelihood of the targets."""
    logits = _logits(kind, predicted_RC)
    if kind == "multilabel":
        known_RC = np.isfinite(targets)
        logits, targets = logits[known_RC], targets[known_RC].astype(np.int64)
    rows = np.arange(len(targets))

    def loss(log_temperature: float) -> float:
        return -float(log_softmax(logits / math.exp(log_temperature), axis=-1)[rows, targets].mean())

    return math.exp(minimize_scalar(loss, bounds=(-3, 3), method="bounded").x)
