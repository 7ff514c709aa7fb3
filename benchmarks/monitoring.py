"""What monitoring costs: training watched in every way, beside the same run with nothing watched, in alternate slices.

Watched as by default: each worker samples itself, the machine and its GPUs every five seconds, the figures go to
Prometheus through Ray, to W&B in a file, and to the alerts. Then the same with W&B online and in trouble, which no run
may notice: a server that is not there, one that takes ten seconds for each call, and one whose calls fail; the last
two from the first values on, when W&B has begun to upload. And nothing watched with the memory guard, beside without.

Both are whole runs of ``train_ray.py``, with Ray and W&B of their own, that start together and then compute in turns,
some seconds at a time, all processes of the other stopped (:mod:`benchmarks.slices`, which says what is counted). That
tells 1 % where the same run differs by 10 % from one time to the next. What the pauses change: the clock goes on for
the five seconds of the sampler and the ten of the slow server, so in the time that it computes a run takes up to twice
as many samples, and the server seems half as slow; the first overstates what watching costs. A run whose W&B gave up
because of a pause would show in its folder, and be no comparison. The model is small, so that a step takes a fifth of
a second on a core and many fit into a slice: what is done each step weighs more than in real training, too. On CUDA
both runs share the GPUs' memory; what a stopped one had queued is done within milliseconds.

What the sampler alone takes is measured in a process that has threads and children as a worker has: process CPU time
with it, less that without.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.launching import NEVER, QUICK_SIZE, SIZES, Changes, Launches, make_store, worker_count
from benchmarks.monitored_runs import INTERVAL_S, Watching, side_by_side
from benchmarks.proteins import Proteins, read_proteins
from benchmarks.stage import Case, Comparison, Contender, Device, Facts, Reference, Setting, Stage

WATCHED, UNWATCHED = "watched", "not watched"
UNGUARDED = "not watched, no memory guard"
UNREACHABLE, SLOW, BROKEN = "W&B unreachable", "W&B slow", "W&B failing"
SAMPLER = "CPU time of a worker's sampler"
ONE_PERCENT = Reference("1 % of a core", 1.0)

LAYERS: dict[Device, int | None] = {"cpu": 2, "cuda": None}
"""Of the model; None for all that its size has."""
TOKENS: dict[Device, int] = {"cpu": 1024, "cuda": 32768}
"""Token budget of the one packed batch that each worker takes in a step."""
SLICE_S: dict[Device, float] = {"cpu": 2.0, "cuda": 4.0}
QUICK_SLICE_S = 0.5
WARMUP_STEPS, QUICK_WARMUP_STEPS = 20, 2
ROUNDS, SAMPLER_ROUNDS = 40, 3
"""A round is a slice of each; two rounds cancel a drift."""
SAMPLED_S, QUICK_SAMPLED_S = 30.0, 2.0
FLOOR = 0.99
_REPOSITORY = Path(__file__).resolve().parent.parent

ON: Changes = {"training": {"gpu_log_interval": INTERVAL_S}, "wandb": {"mode": "offline"}}
ONLINE: Changes = {**ON, "wandb": {"mode": "online"}}
OFF: Changes = {
    "training": {"gpu_log_interval": 0.0},
    "monitoring": {"prometheus": False, "alerts": {"enabled": False}},
    "wandb": {"mode": "disabled"},
}
NO_GUARD: Changes = {**OFF, "training": {**OFF["training"], "memory_guard": {"enabled": False}}}

WAYS = {
    WATCHED: Watching(ON),
    UNREACHABLE: Watching(ONLINE, "unreachable"),
    SLOW: Watching(ONLINE, "slow"),
    BROKEN: Watching(ONLINE, "broken"),
    UNWATCHED: Watching(OFF),
    UNGUARDED: Watching(NO_GUARD),
}
PAIRS = {
    "training, watched": (WATCHED, UNWATCHED),
    "training, W&B unreachable": (UNREACHABLE, UNWATCHED),
    "training, W&B slow": (SLOW, UNWATCHED),
    "training, W&B failing": (BROKEN, UNWATCHED),
    "training, memory guard": (UNWATCHED, UNGUARDED),
}
"""Cases: who is compared with whom."""
QUICK_PAIR = "training, W&B slow"
"""The one of a smoke run: in it takes part whatever the others have."""


def sampler_percent(seconds: float) -> float:
    """CPU time of a worker's sampler at the default interval, percent of a core.

    Args:
        seconds: over which it is measured, with the sampler and then without.
    """
    command = [sys.executable, "-m", "benchmarks.sampler_process", str(INTERVAL_S), str(seconds)]
    done = subprocess.run(command, cwd=_REPOSITORY, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the sampler's process ended with code {done.returncode}: {done.stderr[-2000:]}")
    measured = json.loads(done.stdout)
    return 100 * (measured["with_s"] - measured["without_s"]) / seconds


def _cases(setting: Setting) -> Iterator[Case]:
    proteins = read_proteins(setting.fasta)
    setting.note("writing the store")
    warmup_steps = QUICK_WARMUP_STEPS if setting.quick else WARMUP_STEPS
    launches = Launches(setting, make_store(setting, proteins), worker_count(setting), warmup_steps, NEVER)
    slice_s = QUICK_SLICE_S if setting.quick else SLICE_S[setting.device]
    for name, contenders in ({QUICK_PAIR: PAIRS[QUICK_PAIR]} if setting.quick else PAIRS).items():
        setting.note(f"{name}: starting")
        ways = {contender: _as_measured(WAYS[contender], setting, launches.workers) for contender in contenders}
        with side_by_side(launches, ways, slice_s) as pair:
            pair.facts |= _facts(setting, proteins, launches, slice_s)
            yield Case(
                name,
                "tokens/s",
                tuple(Contender(contender, pair.slice_of(contender), kind="value") for contender in contenders),
                rounds=ROUNDS,
                estimate="mean",
                check=pair.wait_until_steady,
                facts=pair.facts,
            )
    sampled_s = QUICK_SAMPLED_S if setting.quick else SAMPLED_S
    yield Case(
        SAMPLER,
        "% of a core",
        (Contender(WATCHED, lambda: sampler_percent(sampled_s), kind="value"),),
        better="lower",
        rounds=SAMPLER_ROUNDS,
        facts={"interval in s": INTERVAL_S, "seconds measured": sampled_s},
    )


def _as_measured(watching: Watching, setting: Setting, workers: int) -> Watching:
    """The same with steps that are short beside a slice."""
    device = setting.device
    layers = {} if LAYERS[device] is None else {"layers": LAYERS[device]}
    changes: dict[str, Any] = {
        **watching.changes,
        "batch": {"tokens": TOKENS[device], "global_tokens": TOKENS[device] * workers},
        "model": {"backbone": {"source": SIZES[device], **(QUICK_SIZE if setting.quick else layers)}},
    }
    return Watching(changes, watching.server)


def _facts(setting: Setting, proteins: Proteins, launches: Launches, slice_s: float) -> Facts:
    layers = LAYERS[setting.device]
    return {
        **proteins.facts,
        "model": "toy" if setting.quick else SIZES[setting.device] + (f", {layers} layers" if layers else ""),
        "workers": launches.workers,
        "token budget of each worker's step": TOKENS[setting.device],
        "seconds of a slice": slice_s,
        "seconds between samples": INTERVAL_S,
    }


_FLOORS: dict[Device, float] = {"cpu": FLOOR, "cuda": FLOOR}

STAGE = Stage(
    name="monitoring",
    summary="training that is watched in every way, beside training that is not; also with W&B in trouble",
    cases=_cases,
    comparisons=(
        *(Comparison(name, ours, peer, _FLOORS) for name, (ours, peer) in PAIRS.items()),
        Comparison(SAMPLER, WATCHED, ONE_PERCENT, {"cpu": 1.0, "cuda": 1.0}),
    ),
    packages=("ray", "deepspeed", "wandb"),
    distributions=("ray", "deepspeed", "transformers", "wandb"),
)
