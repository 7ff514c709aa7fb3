"""How fast each configuration of a space probably is, learned from a machine whose own speed changes meanwhile.

In: what trials measured, in their order. Out: an estimate for every configuration, tried or not, and what may be gained
by measuring one (once more). The logarithm of tokens per second is regressed by a Gaussian process (Rasmussen and
Williams 2006, algorithm 2.1) as the sum of

- what the settings do: each on its own, in pairs, and all together, neighbouring values of an ordered setting alike;
- what the machine does: an Ornstein-Uhlenbeck process over the time that trials took, for clocks rise and fall, and
  other programs come and go, over half minutes rather than windows;
- noise of the windows, as far apart as those of one trial are from each other.

So a figure from a slow half minute weighs what it is worth, and what a setting did elsewhere counts as well. Where
windows agree, the estimates of what was measured are its figures. What the sizes below are changes little: on made-up
machines the search's answers differ by less than what chance makes of them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from tuning.journal import was_measured
from tuning.settings import Measurement, Settings
from tuning.space import CHECKPOINTING, ORDERED, Value

Floats: TypeAlias = NDArray[np.float64]

ALONE, TOGETHER = 1.0, 0.08
"""Standard deviations, in logarithms: of what a setting does on its own, and of what two of them do together."""

LEVEL = 2.0
"""Standard deviation of the speed of the whole space, about the mean of what was measured."""

REACH = 3.0
"""Places over which the values of an ordered setting act alike: the length scale of a Matérn 3/2 (equation 4.17)."""

ALIKE = 0.3
"""Correlation of what two values of a setting without an order do."""

RECOMPUTING = math.log(3 / 4)
"""What recomputed activations do before anything is known: one forward pass more (Chen et al. 2016)."""

DRIFT, DRIFT_S = 1.5, 40.0
"""The machine's own changes: their size, in scatters of its windows, and the seconds over which they last."""

SCATTER, LEAST_SCATTER = 0.03, 0.005
"""Of a window, where no trial has two of them, and where they agree all too well."""

FAULT, FAULT_NOISE = -1.0, 1.0
"""What crashed, hung or gave NaN counts as this much slower than the rest, but as no more than a hint."""


@dataclass(frozen=True)
class _Visit:
    """A trial's figure: the configuration, when (seconds of measuring), the logarithm of tokens/s, its windows."""

    places: tuple[int, ...]
    time: float
    figure: float
    windows: tuple[float, ...]


class SpeedModel:
    """What trials say of all configurations.

    Args:
        values: of each setting that is searched, as :attr:`training.search_space.SearchSpace.values`.
    """

    def __init__(self, values: Mapping[str, Sequence[Value]]) -> None:
        self._values = {name: list(choice) for name, choice in values.items() if len(choice) > 1}
        self._correlations = [_correlation(name, choice) for name, choice in self._values.items()]
        self._visits: list[_Visit] = []
        self._faults: list[tuple[int, ...]] = []
        self._seconds = 0.0

    def learn(self, settings: Settings, measurement: Measurement) -> None:
        """Take up a trial; those of one configuration one by one."""
        middle = self._seconds + measurement.seconds / 2
        self._seconds += measurement.seconds
        windows = tuple(math.log(window) for window in measurement.windows if window > 0)
        if measurement.status in ("ok", "pruned") and measurement.tokens_per_s:
            figure = math.log(measurement.tokens_per_s)
            self._visits.append(_Visit(self._places(settings), middle, figure, windows))
        elif was_measured(measurement) and measurement.status != "out_of_memory":
            self._faults.append(self._places(settings))

    def tokens_per_s(self, configurations: Sequence[Settings]) -> list[float]:
        """Of each, at the speed that the machine has on the whole.

        Raises:
            ValueError: nothing was learned yet.
        """
        mean, _, _ = self._posterior(configurations, None)
        return [math.exp(value) for value in mean]

    def gains(self, best: Settings, others: Sequence[Settings]) -> list[float]:
        """Expected improvement (Jones et al. 1998, equation 15) of each of the others upon ``best``, in logarithms.

        Args:
            best: the fastest, as far as is known; as uncertain as all else.
            others: what may be faster.

        Raises:
            ValueError: nothing was learned yet.
        """
        mean, variance, with_best = self._posterior([best, *others], 0)
        lead = mean[1:] - mean[0]
        spread = np.sqrt(np.maximum(variance[1:] + variance[0] - 2 * with_best[1:], 1e-12))
        return [
            float(ahead * statistics.NormalDist().cdf(ahead / sd) + sd * statistics.NormalDist().pdf(ahead / sd))
            for ahead, sd in zip(lead, spread, strict=True)
        ]

    def _posterior(self, configurations: Sequence[Settings], at: int | None) -> tuple[Floats, Floats, Floats]:
        """Mean and variance of each, and its covariance with the one ``at`` this place (zeros for None)."""
        if not self._visits:
            raise ValueError("nothing was measured yet")
        asked = self._matrix([self._places(settings) for settings in configurations])
        known = self._matrix([*(visit.places for visit in self._visits), *self._faults])
        figures = self._figures()
        middle = float(np.mean(figures[: len(self._visits)]))
        whitened = np.linalg.inv(np.linalg.cholesky(self._prior(known, known) + self._disturbances()))
        shared = whitened @ self._prior(known, asked)
        mean = middle + self._expected(asked) + shared.T @ (whitened @ (figures - middle - self._expected(known)))
        own = self._prior(asked[:1], asked[:1])[0, 0]  # the same for all
        variance = own - np.sum(shared**2, axis=0)
        if at is None:
            return mean, variance, np.zeros_like(mean)
        return mean, variance, self._prior(asked, asked[at : at + 1])[:, 0] - shared.T @ shared[:, at]

    def _figures(self) -> Floats:
        measured = [visit.figure for visit in self._visits]
        return np.array([*measured, *(statistics.fmean(measured) + FAULT for _ in self._faults)])

    def _disturbances(self) -> Floats:
        """Covariance of all that is not the settings' doing."""
        scatter, count = self._scatter(), len(self._visits)
        times = np.array([visit.time for visit in self._visits])
        drift = max(DRIFT * scatter, self._disagreement())
        covariance = np.diag(np.full(count + len(self._faults), FAULT_NOISE**2))
        covariance[:count, :count] = drift**2 * np.exp(-np.abs(times[:, None] - times[None]) / DRIFT_S)
        noise = [scatter**2 / max(1, len(visit.windows)) for visit in self._visits]
        covariance[range(count), range(count)] += noise
        return covariance

    def _scatter(self) -> float:
        """Standard deviation of a window about its trial's speed, in logarithms, by windows that follow each other."""
        pairs = [pair for visit in self._visits for pair in zip(visit.windows, visit.windows[1:], strict=False)]
        if not pairs:
            return SCATTER
        return max(LEAST_SCATTER, math.sqrt(statistics.fmean((one - other) ** 2 / 2 for one, other in pairs)))

    def _disagreement(self) -> float:
        """Standard deviation of the figures of one configuration; 0 where none was measured twice."""
        figures: dict[tuple[int, ...], list[float]] = {}
        for visit in self._visits:
            figures.setdefault(visit.places, []).append(visit.figure)
        again = [statistics.variance(those) for those in figures.values() if len(those) > 1]
        return math.sqrt(statistics.fmean(again)) if again else 0.0

    def _expected(self, matrix: NDArray[np.intp]) -> Floats:
        """What is expected of configurations before anything was measured, beside the speed of the whole space."""
        if CHECKPOINTING not in self._values:
            return np.zeros(len(matrix))
        column = list(self._values).index(CHECKPOINTING)
        return np.where(matrix[:, column] == self._values[CHECKPOINTING].index(True), RECOMPUTING, 0.0)

    def _prior(self, some: NDArray[np.intp], others: NDArray[np.intp]) -> Floats:
        """Covariance of configurations, a row and a column each, before anything was measured."""
        shape = len(some), len(others)
        alone, squares, product = np.zeros(shape), np.zeros(shape), np.ones(shape)
        for column, correlation in enumerate(self._correlations):
            of_setting = correlation[np.ix_(some[:, column], others[:, column])]
            alone += of_setting
            squares += of_setting**2
            product *= of_setting
        pairs = (alone**2 - squares) / 2  # of each two settings the product
        return LEVEL**2 + ALONE**2 * alone + TOGETHER**2 * (pairs + product)

    def _places(self, settings: Settings) -> tuple[int, ...]:
        return tuple(values.index(getattr(settings, name)) for name, values in self._values.items())

    def _matrix(self, places: Sequence[tuple[int, ...]]) -> NDArray[np.intp]:
        return np.array(places, dtype=np.intp).reshape(len(places), len(self._values))


def _correlation(name: str, values: Sequence[Value]) -> Floats:
    """Of what the values of a setting do on their own."""
    places = np.arange(len(values))
    apart = np.abs(places[:, None] - places[None])
    if name in ORDERED and None not in values:
        scaled = math.sqrt(3) * apart / REACH
        return (1 + scaled) * np.exp(-scaled)
    return np.where(apart == 0, 1.0, ALIKE)
