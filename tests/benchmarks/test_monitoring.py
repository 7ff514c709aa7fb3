"""The monitoring stage compares runs that were watched as it says, and measures the sampler alone."""

from __future__ import annotations

import urllib.error
import urllib.request
from types import SimpleNamespace

import pytest

from benchmarks import fake_wandb_server as server_module
from benchmarks.fake_wandb_server import fake_wandb_server
from benchmarks.launching import Launches, make_store
from benchmarks.monitoring import NO_GUARD, OFF, ON, ONLINE, MonitoredRuns, sampler_percent
from benchmarks.proteins import read_proteins
from benchmarks.stage import Setting, WrongWorkError
from train_config.schema import Config
from training.run_folder import RunFolder

WORKERS = 2


class FakeLaunches:
    """Launches whose runs leave what they are told to."""

    def __init__(self, folder: RunFolder, sampled: int, recorded: bool) -> None:
        self.workers, self.last_run = WORKERS, folder
        folder.monitoring.mkdir(parents=True)
        for worker in range(sampled):
            (folder.monitoring / f"worker-{worker:05d}.jsonl").touch()
        if recorded:
            (folder.path / "wandb" / "offline-run-1").mkdir(parents=True)

    def with_ray(self, changes, environment=None) -> float:
        return 1000.0


def runs(tmp_path, sampled: int, recorded: bool) -> MonitoredRuns:
    return MonitoredRuns(FakeLaunches(RunFolder(tmp_path, "run"), sampled, recorded))  # type: ignore[arg-type]


def test_watched_run_of_which_a_worker_was_not_sampled_is_no_comparison(tmp_path):
    assert runs(tmp_path / "all", WORKERS, recorded=True).watched() == 1000.0
    with pytest.raises(WrongWorkError, match="not every worker was sampled"):
        runs(tmp_path / "one", 1, recorded=True).watched()
    with pytest.raises(WrongWorkError, match="W&B recorded nothing"):
        runs(tmp_path / "none", WORKERS, recorded=False).watched()


def test_run_without_monitoring_that_was_sampled_is_no_comparison(tmp_path):
    assert runs(tmp_path / "none", 0, recorded=False).unwatched() == 1000.0
    with pytest.raises(WrongWorkError, match="it was watched"):
        runs(tmp_path / "one", 1, recorded=False).unwatched()


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


@pytest.mark.slow
def test_a_real_run_is_watched_in_every_way(tmp_path, ray_address, monkeypatch):
    monkeypatch.setattr("benchmarks.monitoring.ON", {**ON, "ray": {"address": ray_address}})
    fasta = tmp_path / "some.fasta"
    fasta.write_text("".join(f">p{number}\n{'MKTAYIAKQR' * (1 + number)}\n" for number in range(60)))
    setting = Setting(device="cpu", quick=True, folder=tmp_path)
    launches = Launches(setting, make_store(setting, read_proteins(fasta)), workers=1, warmup_steps=1, steps=1)
    assert MonitoredRuns(launches).watched() > 0
