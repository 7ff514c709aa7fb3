"""Calibration of a classifier on held-out records: probabilities that mean what they say, and sets with a guarantee.

Temperature scaling (Guo et al. 2017) divides the logits by one number, which changes no predicted label. A conformal set
(Angelopoulos and Bates 2023) holds on average at least the chosen share of a record's true labels, if the record is
exchangeable with the n calibrating records. The nonconformity of a class is the total probability of the classes that
are at least as likely (adaptive sets: Romano et al. 2020). It is 1 - probability for one of several labels, and the
absolute error for a number, whose set is an interval.

The true labels of a record, such as the classes of its residues, are not independent: they share its weight 1 / (n + 1)
(hierarchical conformal prediction: Lee et al. 2023).

Shape legend: R rows (records, or residues of all records), C classes, labels or columns, I true labels of all rows.
"""

import math
from collections.abc import Sequence
from itertools import compress
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax, softmax

from esmeray.common.errors import ConfigError, DataError
from esmeray.common.publishing import grown_folder
from esmeray.common.statistics import ratio
from esmeray.dataset.section import TargetKind
from esmeray.dataset.targets import has_target
from esmeray.model.export.exported_folder import MADE_BY, read_settings_of, write_settings

CALIBRATION_FILE = "calibration.json"
COVERAGE = 0.9
"""Coverage that an evaluation reports."""
CALIBRATE = "esmeray classify evaluate {} --evaluate.calibrate true"
MIN_RECORDS = 20
"""Minimum number of calibrating records."""
_LEVELS = 1000
"""Thresholds are stored for coverages in steps of 1 / _LEVELS."""
_FLOOR = 1e-8
"""Smallest probability whose logarithm is taken. 1 - p of a fp32 probability has no smaller values."""
_FOLDS = 5


class Checked(NamedTuple):
    """Calibrated predictions of records with targets, and their sets of coverage COVERAGE.

    Attributes:
        probabilities: (R, C) calibrated.
        covered: (R,) share of the row's true labels in its set; NaN if it has none.
        sizes: (R,) number of labels in the set; for numbers, of covered ones.
    """

    probabilities: NDArray[np.float32]
    covered: NDArray[np.float64]
    sizes: NDArray[np.float64]


class Calibration(BaseModel):
    """Content of calibration.json.

    Attributes:
        fingerprint: identity of the model that was calibrated.
        records: number of calibrating records.
        temperature: divisor of the logits; 1 for regression.
        thresholds: largest nonconformity in a set, for coverages of 0.001, 0.002 ... up to n / (n + 1): one list, or for
            regression one per column.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    fingerprint: str
    kind: TargetKind
    records: int
    temperature: float
    thresholds: list[list[float]]

    @classmethod
    def load(cls, folder: Path, fingerprint: str) -> "Calibration | None":
        """Load the calibration of an export, None without one. Raises DataError for damage or another model's."""
        path = folder / CALIBRATION_FILE
        if not path.is_file():
            return None
        calibration = read_settings_of(path, "calibration", cls.model_validate)
        if calibration.fingerprint != fingerprint:
            raise DataError(f"{path}: belongs to other weights; calibrate again: {CALIBRATE.format(folder)}")
        return calibration

    def save(self, folder: Path) -> None:
        """Add the calibration to an export, whose other files stay as they are."""
        with grown_folder(folder, folder, MADE_BY) as building:
            path = building / CALIBRATION_FILE
            path.unlink(missing_ok=True)  # a hard link to the previous one
            write_settings(path, self.model_dump())

    def __str__(self) -> str:
        return f"temperature {self.temperature:.3f}, from {self.records:,} records"

    def probabilities(self, predicted_RC: NDArray) -> NDArray[np.float32]:
        """Return (R, C) calibrated probabilities; numbers stay as they are."""
        return _softened(self.kind, _logs(self.kind, predicted_RC), self.temperature)

    def thresholds_of(self, coverage: float) -> NDArray[np.float64]:
        """Return the threshold of a coverage, (1,), or for regression half the width of each interval, (C,).

        Raises ConfigError if there are too few calibrating records.
        """
        level = math.ceil(coverage * _LEVELS - 1e-6)
        if level > min(map(len, self.thresholds)):
            raise ConfigError(
                f"coverage {coverage}: needs at least {math.ceil(coverage / (1 - coverage) - 1e-6):,} calibrating records "
                f"with a target, of each column for numbers; calibrate with more than these {self.records:,}, or lower it"
            )
        return np.array([column[level - 1] for column in self.thresholds])

    def sets(self, calibrated_RC: NDArray, names: Sequence[str], coverage: float) -> list[list[str]]:
        """Return the names in the set of each row, given calibrated probabilities."""
        contained_RC = _scores(self.kind, calibrated_RC) <= self.thresholds_of(coverage)
        return [list(compress(names, row)) for row in contained_RC.tolist()]

    def check(self, predicted_RC: NDArray, targets: NDArray) -> Checked:
        """Apply the calibration to records with targets that it was not fitted to."""
        calibrated_RC = self.probabilities(predicted_RC)
        contained_RC = _scores(self.kind, calibrated_RC, targets) <= self.thresholds_of(COVERAGE)
        truth_RC = _truth(self.kind, targets, calibrated_RC.shape[1])
        labels_R = truth_RC.sum(axis=1)
        covered_R = np.where(labels_R > 0, ratio((contained_RC & truth_RC).sum(axis=1), labels_R), np.nan)
        return Checked(calibrated_RC, covered_R, contained_RC.sum(axis=1))


def fit(
    kind: TargetKind, predicted_RC: NDArray, targets: NDArray, records_R: NDArray, fingerprint: str = ""
) -> Calibration:
    """Calibrate with predictions and targets of held-out records; ``records_R`` numbers the record of each row."""
    known = has_target(targets)
    predicted_RC, targets, records_R = predicted_RC[known], targets[known], records_R[known]
    logs = _logs(kind, predicted_RC)
    temperature = 1.0 if kind == "regression" else _temperature(kind, logs, targets)
    scores_RC = _scores(kind, _softened(kind, logs, temperature), targets)
    truth_RC = _truth(kind, targets, predicted_RC.shape[1])
    # Columns of numbers have different units, so each has its own thresholds.
    columns = np.arange(truth_RC.shape[1])
    groups = [truth_RC & (columns == column) for column in columns] if kind == "regression" else [truth_RC]
    return Calibration(
        fingerprint=fingerprint,
        kind=kind,
        records=len(np.unique(records_R)),
        temperature=temperature,
        thresholds=[_thresholds(scores_RC[mask_RC], records_R[np.nonzero(mask_RC)[0]]) for mask_RC in groups],
    )


def cross_fitted(kind: TargetKind, predicted_RC: NDArray, targets: NDArray, records_R: NDArray) -> Checked:
    """Check the calibrating records themselves: each by a calibration with the other folds.

    Raises DataError if they are too few to calibrate with.
    """
    number = len(np.unique(records_R[has_target(targets)]))
    if number < MIN_RECORDS:
        raise DataError(f"{number} records with a target are too few to calibrate; give at least {MIN_RECORDS}")
    checked = Checked(np.empty(predicted_RC.shape, np.float32), *np.zeros((2, len(records_R))))
    for fold in range(_FOLDS):
        test_R = records_R % _FOLDS == fold
        others = fit(kind, predicted_RC[~test_R], targets[~test_R], records_R[~test_R])
        for whole, part in zip(checked, others.check(predicted_RC[test_R], targets[test_R]), strict=True):
            whole[test_R] = part
    return checked


def _logs(kind: TargetKind, predicted_RC: NDArray) -> NDArray[np.float64]:
    """Logits up to a constant: (R, C), or (R, C, 2) for labels that are true or not; numbers stay as they are."""
    if kind == "regression":
        return predicted_RC
    shares = predicted_RC.astype(np.float64)
    if kind == "multilabel":
        shares = np.stack([1 - shares, shares], axis=-1)
    return np.log(np.maximum(shares, _FLOOR))


def _softened(kind: TargetKind, logs: NDArray, temperature: float) -> NDArray[np.float32]:
    if kind == "regression":
        return logs.astype(np.float32)
    shares = softmax(logs / temperature, axis=-1).astype(np.float32)
    return shares[..., 1] if kind == "multilabel" else shares


def _temperature(kind: TargetKind, logs: NDArray[np.float64], targets: NDArray) -> float:
    """The temperature with the highest likelihood of the targets."""
    if kind == "multilabel":
        known_RC = np.isfinite(targets)
        logs, targets = logs[known_RC], targets[known_RC].astype(np.int64)
    rows = np.arange(len(targets))

    def loss(log_temperature: float) -> float:
        return -float(log_softmax(logs / math.exp(log_temperature), axis=-1)[rows, targets].mean())

    return math.exp(minimize_scalar(loss, bounds=(-3, 3), method="bounded").x)


def _truth(kind: TargetKind, targets: NDArray, columns: int) -> NDArray[np.bool_]:
    """(R, C) True for true labels, or known numbers."""
    if kind == "regression":
        return np.isfinite(targets)
    return targets == 1 if kind == "multilabel" else targets[:, None] == np.arange(columns)


def _scores(kind: TargetKind, calibrated_RC: NDArray, targets: NDArray | None = None) -> NDArray:
    """(R, C) nonconformity of each label, or of the measured numbers."""
    if kind == "regression":
        return np.abs(calibrated_RC - targets)
    if kind == "multilabel":
        return 1 - calibrated_RC
    order_RC = np.argsort(-calibrated_RC, axis=1, kind="stable")
    sums_RC = np.empty_like(calibrated_RC)
    np.put_along_axis(sums_RC, order_RC, np.take_along_axis(calibrated_RC, order_RC, axis=1).cumsum(axis=1), axis=1)
    return sums_RC


def _thresholds(scores_I: NDArray, records_I: NDArray) -> list[float]:
    """Quantiles of the scores at each reachable coverage, with the finite-sample correction of conformal prediction."""
    _, record_I, labels_n = np.unique(records_I, return_inverse=True, return_counts=True)
    order_I = np.argsort(scores_I, kind="stable")
    # One further record, the one to predict, could have any score.
    reached_I = np.cumsum(1 / labels_n[record_I[order_I]]) / (len(labels_n) + 1)
    first = np.searchsorted(reached_I, np.arange(1, _LEVELS) / _LEVELS - 1e-9)
    return scores_I[order_I[first[first < len(order_I)]]].astype(float).tolist()
