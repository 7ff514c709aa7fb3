"""A search as an experiment of Ray Tune, one trial at a time.

Ray Tune asks :class:`SearchAlgorithm` for a configuration, and each of its trials asks the one
:class:`~tuning.pool.MeasuringPool`, which lives in an actor beside them: trials come and go and take no core, while the
pool's workers, which hold the devices, stay.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ray
from ray import tune
from ray.tune.search import Searcher

from cluster import connection
from cluster.signals import StopSignals
from common.errors import EsmerayError, ResourceError
from train_config.tune_schema import TuneConfig
from training.launch.driver import fit
from tuning.journal import Trial
from tuning.search import Proposal, Search
from tuning.settings import Measurement, Settings

METRIC = "tokens_per_s"

NEXT_TO_NOTHING = {"memory": 1.0}
"""Resources of a trial: a byte, as Ray Tune (2.60) takes no empty request. The cores belong to the pool's workers."""


class SearchAlgorithm(Searcher):
    """Asks a :class:`Search` for Ray Tune; results of an earlier attempt are not measured again.

    Args:
        search: what to measure next.
        earlier: trials of an earlier attempt.
        asked: called with each configuration before it is measured.
        measured: called with each new result before the next is asked for.
    """

    def __init__(
        self,
        search: Search,
        earlier: Sequence[Trial],
        asked: Callable[[Proposal], None],
        measured: Callable[[Proposal, Measurement], None],
    ) -> None:
        super().__init__(metric=METRIC, mode="max")
        self._search, self._asked, self._measured = search, asked, measured
        self._earlier: defaultdict[Settings, list[Measurement]] = defaultdict(list)
        for trial in earlier:
            self._earlier[trial.settings].append(trial.measurement)
        self._proposal: Proposal | None = None
        self.stopped = False
        """Set it to end the search; the result of a trial in progress is then dropped."""
        self.error: EsmerayError | None = None

    def suggest(self, trial_id: str) -> Any:
        """Return what a trial of Ray Tune gets: ``{"settings": ..., "to_beat": tokens per second or None}``."""
        while not self.stopped and (proposal := self._search.ask()) is not None:
            if earlier := self._earlier[proposal.settings]:
                self._search.tell(proposal.settings, earlier.pop(0))
                continue
            self._proposal = proposal
            self._asked(proposal)
            return {"settings": asdict(proposal.settings), "to_beat": self._search.to_beat(proposal)}
        return Searcher.FINISHED

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Take the result of the configuration that was suggested last."""
        if self.stopped or self._proposal is None:
            return
        if result is None or "measurement" not in result:
            reason = (result or {}).get("error", "a trial ended without a result (Ray's logs say why)")
            self.error, self.stopped = ResourceError(reason), True
            return
        measurement = Measurement(**json.loads(result["measurement"]))
        self._measured(self._proposal, measurement)
        self._search.tell(self._proposal.settings, measurement)

    def __getstate__(self) -> dict[str, Any]:
        """Return nothing: Ray Tune keeps a copy of its search, and this one may hold a terminal."""
        return {}

    def save(self, checkpoint_path: str) -> None:
        """Save nothing: the journal has every trial."""

    def restore(self, checkpoint_path: str) -> None:
        """See :meth:`save`."""


class _PoolHost:
    """The actor in which the pool lives. Its workers end with it."""

    def __init__(self, make_pool: Callable[[], Any], search: TuneConfig) -> None:
        self._pool, self._search = make_pool(), search

    def measure(self, settings: dict[str, Any], to_beat: float | None) -> dict[str, Any]:
        """Return what Ray Tune keeps of a trial: it flattens what is nested, so the measurement travels as JSON."""
        section, margin = self._search.measurement, self._search.search.prune_margin
        try:
            measurement: Measurement = self._pool.measure(Settings(**settings), section, to_beat, margin)
        except EsmerayError as error:
            return {METRIC: 0.0, "error": str(error)}
        return {METRIC: measurement.tokens_per_s or 0.0, "measurement": json.dumps(asdict(measurement))}


def run_trials(
    algorithm: SearchAlgorithm,
    make_pool: Callable[[], Any],
    search: TuneConfig,
    most: int,
    folder: Path,
    signals: StopSignals,
) -> Exception | None:
    """Run Ray Tune to the end of the search, or to a signal; return what ended it early, if anything did.

    Args:
        algorithm: the search.
        make_pool: makes the pool, in its actor.
        search: how the pool measures.
        most: trials that may be asked for.
        folder: of Ray Tune's own files, which are removed in the end.
        signals: the first one ends the trial in progress.
    """
    actor: Any = ray.remote(_PoolHost).options(num_cpus=0, runtime_env=connection.worker_environment())
    pool = actor.remote(make_pool, search)

    def stop() -> None:
        algorithm.stopped = True
        ray.kill(pool)

    def trial(asked: dict[str, Any]) -> None:  # a closure is sent by value: a trial need not import this module
        import ray
        from ray import tune

        tune.report(ray.get(pool.measure.remote(asked["settings"], asked["to_beat"])))

    signals.hand_over(stop, "stopping after the trials measured so far")
    logging.getLogger("ray.tune").setLevel(logging.CRITICAL)  # the trial that a signal ends is a failure to it
    os.environ.setdefault("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")
    os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")  # the new one prints tables also with verbose=0 (ray 2.60)
    tuner = tune.Tuner(
        tune.with_resources(trial, NEXT_TO_NOTHING),
        tune_config=tune.TuneConfig(
            search_alg=algorithm,
            num_samples=most,
            max_concurrent_trials=1,  # trials never share a device
            reuse_actors=True,
        ),
        run_config=tune.RunConfig(name=folder.name, storage_path=str(folder.parent), verbose=0),
    )
    try:
        error = fit(tuner, signals)
    finally:
        ray.kill(pool)
        shutil.rmtree(folder, ignore_errors=True)
    return algorithm.error or error
