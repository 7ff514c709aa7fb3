"""The monitoring stage compares every way of watching with none, and measures the sampler alone."""

from __future__ import annotations

import functools
import sys
import urllib.error
import urllib.request
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from benchmarks import monitored_runs, monitoring
from benchmarks.launching import ray_command
from benchmarks.monitoring import (
    NO_GUARD,
    OFF,
    ON,
    ONLINE,
    PAIRS,
    SLOW,
    UNGUARDED,
    UNWATCHED,
    WAYS,
    _cases,
    sampler_percent,
)
from benchmarks.protocol import QUICK, measure_case
from benchmarks.stage import Setting
from tests.monitoring import fake_wandb_server as server_module
from tests.monitoring.fake_wandb_server import fake_wandb_server
from train_config.schema import Config


def test_watched_is_what_a_user_has_without_settings():
    watched, default = Config.model_validate(ON), Config()
    assert (watched.monitoring, watched.wandb) == (default.monitoring, default.wandb)
    assert watched.training.gpu_log_interval == default.training.gpu_log_interval
    unwatched = Config.model_validate(OFF)
    assert unwatched.training.gpu_log_interval == 0
    assert not unwatched.monitoring.prometheus
    assert Config.model_validate(ONLINE).wandb.mode == "online"
    guarded = unwatched.training.memory_guard.enabled, Config.model_validate(NO_GUARD).training.memory_guard.enabled
    assert guarded == (True, False)


@pytest.mark.parametrize(("behaviour", "outcome"), [("slow", "answered"), ("broken", "HTTP 500")])
def test_server_is_slow_or_fails_from_the_first_values_on(behaviour, outcome, monkeypatch):
    monkeypatch.setattr(server_module, "SLOW_S", 0.0)
    with fake_wandb_server() as server:
        server.behaviour_at_history = behaviour
        assert call(server.url, b"{}") == "answered"
        assert call(server.url, b'{"wandb-history.jsonl": 1}') == outcome
        assert call(server.url, b"{}") == outcome
        assert server.behaviour == behaviour


def call(address: str, body: bytes) -> str:
    try:
        with urllib.request.urlopen(f"{address}/other", data=body, timeout=10):
            return "answered"
    except urllib.error.HTTPError as error:
        return f"HTTP {error.code}"


def test_sampler_that_fails_is_told(monkeypatch):
    failed = SimpleNamespace(returncode=1, stderr="out of luck", stdout="")
    monkeypatch.setattr("subprocess.run", lambda *arguments, **options: failed)
    with pytest.raises(RuntimeError, match="out of luck"):
        sampler_percent(1.0)


@pytest.mark.slow
def test_sampler_takes_some_time_of_a_core():
    assert 0 < sampler_percent(0.5) < 100


def test_every_way_of_watching_is_compared_with_nothing_watched_and_the_guard_with_none():
    assert {WAYS[ours].server for ours, peer in PAIRS.values() if peer == UNWATCHED} == {
        "none",
        "unreachable",
        "slow",
        "broken",
    }
    assert PAIRS["training, memory guard"] == (UNWATCHED, UNGUARDED)


def watched_by_ray(store: str, config: Path) -> list[str]:
    """train_ray.py for the first run; for the other the worker loop alone, started when the first has begun."""
    if config.stem == "run-0":
        return ray_command(config)
    wait = f"while [ ! -e {config.parent}/run-0/logs/worker-0.log ]; do sleep 0.2; done; exec"
    launcher = f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node 1"
    return ["sh", "-c", f"{wait} {launcher} -m benchmarks.worker_program {config} {store}"]


@pytest.mark.slow
def test_real_runs_compute_in_turns_with_a_slow_server_of_wandb_and_leave_no_process(tmp_path, monkeypatch):
    """One worker and a toy of a model, but every process that a watched run has; what it is beside has no cluster."""
    monkeypatch.setattr(server_module, "SLOW_S", 2.0)
    monkeypatch.setattr(monitoring, "worker_count", lambda setting: 1)
    monkeypatch.setattr(monitored_runs, "ray_command", functools.partial(watched_by_ray, str(tmp_path / "store")))
    with closing(_cases(Setting(device="cpu", quick=True, folder=tmp_path))) as cases:  # type: ignore[type-var]
        case = next(cases)
        assert [contender.name for contender in case.contenders] == [SLOW, UNWATCHED]
        measured = measure_case(case, "cpu", QUICK)
    assert all(len(speeds) == 1 and speeds[0] > 0 for speeds in measured.samples.values())
    assert f"CPU seconds of a million tokens, {SLOW}" in measured.facts
    assert not [process for process in psutil.process_iter() if str(tmp_path) in " ".join(process.cmdline())]
