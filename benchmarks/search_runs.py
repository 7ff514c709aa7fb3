"""Searches of the throughput search's benchmark, each a program of its own as a user starts it, and what they found.

In: the stage's setting and a store. Out: :class:`Searches`, which makes each search when it is first asked for, trains
with what was found, and fills the facts of the cases.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from benchmarks.found_in_training import FoundInTraining, Measuring, Training, found_in_training
from benchmarks.launching import run_program, tokens_per_s
from benchmarks.search import CASES, FOUND, TIME, TRAINED
from benchmarks.stage import Facts, Setting, WrongWorkError
from run_folder.metrics_log import read_metrics
from run_folder.paths import RunFolder
from train_config.loading import dump_config, load_config
from train_config.schema import Config
from train_config.tune_schema import TuneConfig
from training.launch import cluster
from tuning.journal import Trial, TrialJournal, was_measured
from tuning.knowledge import Knowledge, fits
from tuning.pool import MeasuringPool
from tuning.settings import Measurement, Settings
from tuning.tune_trials import settings_text

SPACE: dict[str, list[Any]] = {
    "tokens": [1024, 2048, 4096, 8192, 16384],
    "num_workers": [0, 1, 2],
    "amp_dtype": ["bf16", "none"],
    "gradient_checkpointing": [False, True],
}
QUICK_SPACE: dict[str, list[Any]] = {
    "tokens": [1024, 2048],
    "num_workers": [0, 1],
    "amp_dtype": ["none"],
    "gradient_checkpointing": [False],
}
TRIALS, QUICK_TRIALS = 12, 3
"""A fifth of the space: the start of the program, and the trials that are measured in full, leave no room for more."""
OWN_TOKENS = 2048
MODEL = {"layers": 2, "hidden_size": 128, "heads": 4}
QUICK_MODEL = {"layers": 1, "hidden_size": 32, "heads": 2}
MEASUREMENT = {"warmup_steps": 2, "window_s": 1.5, "max_windows": 4, "timeout_s": 120.0}
QUICK_MEASUREMENT = {"warmup_steps": 1, "window_s": 0.2, "max_windows": 2, "timeout_s": 120.0}
AGAIN_MEASUREMENT = {"window_s": 2.5, "max_windows": 1}
"""One window, longer than those of the search: the machine changes its speed from one half minute to the next."""
FINALISTS, TURNS = 5, 15
"""Of the exhaustive search's fastest, how many are measured again beside what the searches found, and how often."""
STARTED_S, TRAINED_S, WARMUP_STEPS, LEAST_STEPS = 15.0, 20.0, 5, 10
"""Seconds of training that are left out, in which Ray's other processes start as well, and those that count."""
QUICK_TRAINED_S = 0.1
SLICE_S, QUICK_SLICE_S = 4.0, 0.2
_NEVER = 10**9
PROGRAM = (sys.executable, "train_ray.py")
_REPOSITORY = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Found:
    """What a search came to.

    Attributes:
        seconds: that the program took, its start included.
        folder: of the search.
        measurements: of every configuration that was measured; of those that were measured twice the mean.
        best: the fastest that fits.
        trials: in their order, without those that were answered from others.
    """

    seconds: float
    folder: Path
    measurements: Mapping[Settings, Measurement]
    best: Settings
    trials: Sequence[Trial] = ()

    @property
    def figure(self) -> float:
        """Tokens per second of the best, as the search measured it."""
        return self.measurements[self.best].tokens_per_s or 0.0


@dataclass(frozen=True)
class Judged:
    """Configurations that were measured again in turns.

    Attributes:
        figures: tokens per second of each, in every turn.
    """

    figures: Mapping[Settings, Sequence[float]]

    def fastest(self, turn: int) -> float:
        """Tokens per second, in this turn, of the one that was the fastest in the others.

        Of several figures with noise the largest is too large: what is chosen by it can't be judged by it.
        """

        def elsewhere(settings: Settings) -> float:
            figures = self.figures[settings]
            others = [figure for number, figure in enumerate(figures) if number != turn]
            return statistics.fmean(others or figures)

        return self.figures[max(self.figures, key=elsewhere)][turn]


@dataclass
class Searches:
    """Searches so far, each made when it is first asked for; and what is done with what they found.

    Attributes:
        setting: device and folder.
        store: what all train on.
        facts: filled with what they tell, a dictionary a case.
    """

    setting: Setting
    store: Path
    facts: dict[str, Facts] = field(default_factory=lambda: {case: {} for case in CASES})
    _found: dict[int, Found] = field(default_factory=dict)
    _trained: dict[int, float] = field(default_factory=dict)

    @cached_property
    def exhaustive(self) -> Found:
        """Every configuration, in full."""
        found = self._search("grid", seed=0)
        self.facts[TIME]["configurations"] = len(found.measurements)
        self.facts[FOUND]["fastest of all"] = words(found.best)
        slowest = min(m.tokens_per_s for m in found.measurements.values() if m.tokens_per_s)
        self.facts[FOUND]["fastest of all beside the slowest"] = round(found.figure / slowest, 2)
        return found

    def search(self, seed: int) -> Found:
        """By the default algorithm from this seed."""
        if seed not in self._found:
            found = self._found[seed] = self._search("tpe", seed)
            self.facts[TIME][f"trials, seed {seed}"] = len(found.trials)
            self.facts[FOUND][f"found by seed {seed}"] = words(found.best)
            self._trained[seed] = self._train(seed, found)
        return self._found[seed]

    def speed_by_exhaustive(self, settings: Settings) -> float:
        """Tokens per second of a configuration as the exhaustive search measured it."""
        return self.exhaustive.measurements[settings].tokens_per_s or 0.0

    @cached_property
    def judged(self) -> Judged:
        """What the searches so far found, beside the fastest of all."""
        judged = self.beside_the_fastest(FOUND, [found.best for found in self._found.values()], self.fitting())
        for seed, found in self._found.items():
            shares = [figure / judged.fastest(turn) for turn, figure in enumerate(judged.figures[found.best])]
            self.facts[FOUND][f"seed {seed} beside the fastest, mean of the turns"] = round(statistics.fmean(shares), 3)
        return judged

    def fitting(self) -> list[Settings]:
        """The configurations that ran in the exhaustive search and left the margin of memory free."""
        margin = self.tune_config("grid", 0).memory_margin
        return [settings for settings, measured in self.exhaustive.measurements.items() if fits(measured, margin)]

    def beside_the_fastest(self, case: str, found: list[Settings], among: list[Settings]) -> Judged:
        """Tokens per second of what was found and of the exhaustive search's fastest, measured again in turns.

        Args:
            case: whose facts tell the figures.
            found: what searches found.
            among: of which to take the fastest.
        """
        by_figure = sorted(among, key=self.speed_by_exhaustive, reverse=True)
        contested = list(dict.fromkeys([*by_figure[:FINALISTS], *found]))
        figures: dict[Settings, list[float]] = {settings: [] for settings in contested}
        with self._pool() as pool:
            for turn in range(self.turns):
                first = turn % len(contested)
                for settings in contested[first:] + contested[:first]:
                    figures[settings].append(self._measured(pool, settings))
        ranked = sorted(contested, key=lambda settings: statistics.median(figures[settings]), reverse=True)
        for place, settings in enumerate(ranked, 1):
            rates = ", ".join(f"{rate:,.0f}" for rate in figures[settings])
            self.facts[case][f"place {place}, tokens/s in turns"] = f"{words(settings)}: {rates}"
        return Judged(figures)

    @property
    def turns(self) -> int:
        """In which what was found is judged."""
        return 1 if self.setting.quick else TURNS

    def trained(self, seed: int) -> float:
        """Tokens per second of ``train_ray.py`` with best.yaml, right after the search."""
        self.search(seed)
        return self._trained[seed]

    def _train(self, seed: int, found: Found) -> float:
        left_out, counted = self._steps(found, STARTED_S, WARMUP_STEPS), self._steps(found, TRAINED_S, LEAST_STEPS)
        training = self._training(found, f"trained-{seed}", left_out + counted)
        run_program(training.command)
        metrics = read_metrics(training.metrics)
        trained = tokens_per_s([record for record in metrics if record["kind"] == "train"][left_out:])
        self.facts[TRAINED] |= {
            f"tokens/s of the search, seed {seed}": round(found.figure),
            f"tokens/s of train_ray.py, seed {seed}": round(trained),
        }
        return trained

    def _steps(self, found: Found, seconds: float, least: int) -> int:
        """That training with what was found takes in so many seconds."""
        seconds = QUICK_TRAINED_S if self.setting.quick else seconds
        return max(least, math.ceil(seconds * found.figure / self.config.batch.global_tokens))

    def _training(self, found: Found, name: str, steps: int) -> Training:
        """Training with best.yaml."""
        command = [*PROGRAM, "--config", str(found.folder / "best.yaml"), "--run.name", name]
        command += ["--training.max_steps", str(steps)]
        metrics = RunFolder(self.config.run.storage_path, name).metrics
        return Training(command, metrics, WARMUP_STEPS, QUICK_SLICE_S if self.setting.quick else SLICE_S)

    def agreement(self, seed: int) -> float:
        """The smaller of the tokens/s that ``train_ray.py`` gave and the search's figure, as a share of the larger."""
        both = self.trained(seed), self.search(seed).figure
        return min(both) / max(both)

    @contextmanager
    def in_training(self, seed: int) -> Iterator[FoundInTraining]:
        """What this seed found, measured by the search's workers and trained with at once."""
        found, tune = self.search(seed), self.tune_config("tpe", seed)
        folder = self.setting.folder / f"in-training-{seed}"
        folder.mkdir()
        measuring = Measuring(
            self._written(self.config, f"{tune.name}.experiment"), self.store, found.best, tune.measurement
        )
        with found_in_training(folder, measuring, self._training(found, folder.name, _NEVER)) as both:
            yield both

    @contextmanager
    def _pool(self) -> Iterator[MeasuringPool]:
        with cluster.connected(self.config.ray), MeasuringPool(self.config, self.store) as pool:
            pool.start(1)
            yield pool

    def _measured(self, pool: MeasuringPool, settings: Settings) -> float:
        changes = {} if self.setting.quick else AGAIN_MEASUREMENT
        result = pool.measure(settings, self.tune_config("tpe", 0, measurement=changes).measurement)
        if result.tokens_per_s is None:
            raise WrongWorkError(f"{words(settings)}: measured before, now {result.reason}")
        return result.tokens_per_s

    @cached_property
    def config(self) -> Config:
        """The experiment: a small budget, in fp32, loaded by the worker itself."""
        space = QUICK_SPACE if self.setting.quick else SPACE
        tokens = space["tokens"][0] if self.setting.quick else OWN_TOKENS
        return Config.model_validate(
            {
                "run": {"name": "experiment", "storage_path": str(self.setting.folder.resolve())},
                "data": {"source": [str(self.store)], "validation_share": 0.0, "num_workers": 0},
                "batch": {"tokens": tokens, "global_tokens": space["tokens"][-1]},
                "model": {
                    "task": "masked_lm",
                    "backbone": {"source": "esm2_t6_8M", **(QUICK_MODEL if self.setting.quick else MODEL)},
                },
                "training": {"amp_dtype": "none", "evaluate_every_steps": _NEVER},
                "deepspeed": {"config": str(_REPOSITORY / "train_config" / "zero2.yaml")},
                "checkpoint": {"every_steps": _NEVER},
                "ray": {"address": "local", "num_workers": 1},
                "wandb": {"mode": "disabled"},
            }
        )

    def tune_config(self, algorithm: str, seed: int, **changes: Any) -> TuneConfig:
        """A search of the space; ``changes`` are to its name, space and so on."""
        quick = self.setting.quick
        choice: dict[str, Any] = {"max_trials": None if algorithm == "grid" else QUICK_TRIALS if quick else TRIALS}
        if algorithm == "grid":
            choice["repeats"] = 0  # each configuration once
        settings: dict[str, Any] = {
            "name": f"{algorithm}-{seed}",
            "space": QUICK_SPACE if quick else SPACE,
            "measurement": QUICK_MEASUREMENT if quick else MEASUREMENT,
            "search": {"algorithm": algorithm, "seed": seed, **choice},
        }
        for name, change in changes.items():
            settings[name] = settings[name] | change if isinstance(change, dict) else change
        return TuneConfig.model_validate(settings)

    def warm_up(self) -> None:
        """Bring what every search loads into the page cache: the first would pay for it alone."""
        fixed = {name: values[:1] for name, values in QUICK_SPACE.items()}
        short = {"window_s": QUICK_MEASUREMENT["window_s"], "max_windows": 1}
        self.run(self.tune_config("grid", 0, name="warm-up", space=fixed, measurement=short), PROGRAM)

    def run(self, tune: TuneConfig, command: Sequence[str], *more: str) -> Found:
        """Search by a program that takes the experiment's file, that of the search, and what is more."""
        experiment, settings = self._written(self.config, f"{tune.name}.experiment"), self._written(tune, tune.name)
        start_s = time.perf_counter()
        run_program([*command, "--config", str(experiment), "--tune", str(settings), *more])
        seconds = time.perf_counter() - start_s
        return read_found(Path(self.config.run.storage_path) / tune.name, seconds, tune.memory_margin)

    def _written(self, settings: Config | TuneConfig, name: str) -> Path:
        """The file of this name with these settings."""
        path = self.setting.folder / f"{name}.yaml"
        path.write_text(dump_config(settings), encoding="utf-8")
        return path

    def _search(self, algorithm: str, seed: int) -> Found:
        """Search as a user does."""
        tune = self.tune_config(algorithm, seed)
        found = self.run(tune, PROGRAM)
        of_trials = sum(trial.measurement.seconds for trial in found.trials)
        self.facts[TIME][f"seconds of trials alone, {tune.name}"] = round(of_trials, 1)
        return found


def read_found(folder: Path, seconds: float, memory_margin: float) -> Found:
    """What a search left in its folder.

    Raises:
        WrongWorkError: it found nothing, or best.yaml is not what its trials say.
    """
    knowledge = Knowledge(memory_margin)
    trials = [trial for trial in TrialJournal(folder / "trials.jsonl").trials if was_measured(trial.measurement)]
    for trial in trials:
        knowledge.learn(trial.settings, trial.measurement)
    if knowledge.best() is None:
        raise WrongWorkError(f"{folder.name}: no configuration was measured to the end")
    config = load_config(folder / "best.yaml")
    best = Settings.of(config, int(config.ray.num_workers))
    if not knowledge.fits(best) or knowledge.measurements[best].status != "ok":
        raise WrongWorkError(f"{folder.name}: best.yaml is none of its trials that were measured to the end and fit")
    return Found(seconds, folder, knowledge.measurements, best, trials)


def words(settings: Settings) -> str:
    """The varied settings of a configuration, in a line."""
    return settings_text(asdict(settings), list(SPACE))


def space_facts(setting: Setting) -> Facts:
    """What is searched, and with which model."""
    space, model = (QUICK_SPACE, QUICK_MODEL) if setting.quick else (SPACE, MODEL)
    facts: Facts = {"model": ", ".join(f"{value} {name}" for name, value in model.items())}
    return facts | {f"values of {name}": ", ".join(map(str, values)) for name, values in space.items()}
