"""``esmeray tune tokens``: the largest budget that fits, found in few trials, and the fastest."""

from __future__ import annotations

import os
import re
import signal
import threading
import time

import pytest
import ray
from hypothesis import given, settings
from hypothesis import strategies as st
from ray.exceptions import RayActorError
from rich.console import Console

from tests.classifiers import labelled_fasta
from tests.runs import tiny_config
from tools.tune import tokens as tokens_command
from train_config.loading import dump_config
from train_config.tune_schema import MeasurementSection
from tuning import pool as measuring_pool
from tuning.budgets import UNIT, Found, search_budgets
from tuning.settings import Measurement

MIB = 2**20
TOTAL = 1000 * MIB
MARGIN = 0.08
QUICK = MeasurementSection(warmup_steps=1, window_s=0.1, max_windows=1)
PATIENT = ("--seconds", "200")


class Machine:
    """A device whose memory is in proportion to the budget, where a trial takes a second for each 1,000 tokens."""

    def __init__(self, base_bytes: float, token_bytes: float, total_bytes: int = TOTAL) -> None:
        self.base_bytes, self.token_bytes, self.total_bytes = base_bytes, token_bytes, total_bytes
        self.now = 0.0
        self.ran_out = 0
        self.asked: list[int] = []

    def measure(self, tokens: int) -> Measurement:
        self.asked.append(tokens)
        self.now += tokens / 1000
        peak = int(self.base_bytes + tokens * self.token_bytes)
        if peak > self.total_bytes:
            self.ran_out += 1
            return Measurement("out_of_memory", "out of memory", None, [], peak, self.total_bytes)
        return Measurement("ok", "", 5000 - abs(tokens - 2048), [], peak, self.total_bytes)

    def search(self, smallest: int = 500, largest: int = 2**20, seconds: float = 1e9, own: int | None = None) -> Found:
        return search_budgets(
            self.measure,
            smallest=smallest,
            largest=largest,
            own=own or 512,
            memory_margin=MARGIN,
            deadline=self.now + seconds,
            clock=lambda: self.now,
        )


@settings(deadline=None)
@given(base=st.integers(0, 600), token_kib=st.integers(1, 500))
def test_largest_budget_is_found_to_the_resolution_in_few_trials_without_running_out_often(base, token_kib):
    machine = Machine(base * MIB, token_kib * 1024)
    search = machine.search()
    end = int(((1 - MARGIN) * TOTAL - base * MIB) / (token_kib * 1024))
    if end < 512:
        assert not search.fitting
        return
    largest = max(search.fitting)
    assert largest <= min(end, 2**20)
    assert largest > min(end, 2**20) - max(UNIT, end / 8) - UNIT
    assert len(search.budgets.results) <= 22
    assert machine.ran_out <= 2, "two measurements show how far the memory goes"


def test_budget_that_batches_can_not_fill_is_not_asked_for():
    search = Machine(0, 1).search(own=8192, largest=5000)
    assert max(search.budgets.results) == max(search.fitting) == search.largest == 5120
    assert re.search(r"not measured +8,192 tokens, the experiment's own budget: .* is 5,120", advice(search, 8192))


@settings(deadline=None)
@given(end=st.integers(600, 100_000), own=st.integers(500, 200_000))
def test_own_budget_is_measured_first_and_the_largest_is_found_from_it(end, own):
    machine = Machine(0, (1 - MARGIN) * TOTAL / end)
    search = machine.search(own=own)
    assert machine.asked[0] == own
    assert len(set(machine.asked)) == len(machine.asked)
    assert end - max(UNIT, end / 8) - UNIT < max(search.fitting) <= end


def test_smaller_budgets_come_last_and_only_while_there_is_time():
    machine = Machine(0, 1)
    machine.search(own=4096, largest=8192)
    assert machine.asked == [4096, 8192, 2048, 1024, 512]
    hasty = Machine(0, 1)
    search = hasty.search(own=4096, largest=8192, seconds=13)
    assert hasty.asked == [4096, 8192]
    assert search.ran_out_of_time
    assert not search.larger_left


def advice(search: Found, global_tokens: int, *, workers: int = 1, inference: bool = False) -> str:
    to_set = tokens_command._to_set(search, global_tokens, workers, inference)
    return "\n".join([*tokens_command._fitting(search, MARGIN), *to_set])


def test_what_is_not_known_is_said_with_the_reason():
    text = advice(Machine(0, 1).search(own=1024, seconds=1), 4096)
    assert "more may fit: the time was over" in text
    assert re.search(r"fastest +not known: the time was over .*--seconds", text)
    assert "set  " not in text
    only = advice(Machine(0, TOTAL / 600).search(), 4096)
    assert re.search(r"fastest +not known: no other budget", only)
    assert "--batch.tokens 512 --batch.global_tokens 4096" in only
    assert "raise --seconds" in tokens_command._nothing_fits(Machine(0, MIB).search(own=4096, seconds=1))


def test_keys_to_set_are_those_of_the_fastest_that_fits_and_of_one_that_keeps_the_global_batch():
    search = Machine(100 * MIB, 0.3 * MIB).search()
    text = advice(search, 32768)
    assert re.search(r"largest that fits +2,560 tokens: 868 MiB of 1,000 MiB, 8% left free", text)
    assert re.search(r"fastest +2,048 tokens: 5,000 tokens/s", text)
    assert "--batch.tokens 2048 --batch.global_tokens 32768" in text
    assert "--batch-tokens 2048" in advice(search, 32768, inference=True)
    of_four = advice(search, 2048, workers=4)
    assert "--batch.tokens 2048 --batch.global_tokens 8192" in of_four
    assert "--batch.tokens 512 keeps batch.global_tokens 2048" in of_four
    odd = advice(search, 3 * 1024)
    assert "--batch.tokens 2048 --batch.global_tokens 4096" in odd
    assert "--batch.tokens 1024 keeps batch.global_tokens 3072" in odd


def test_table_says_what_was_not_tried_and_why_something_failed():
    console = Console(width=200)
    machine = Machine(100 * MIB, 0.3 * MIB)
    with console.capture() as capture:
        console.print(tokens_command._table(machine.search()))
        console.print(tokens_command._table(Machine(2 * TOTAL, 1).search()))
    assert machine.ran_out == 0
    rows = capture.get().splitlines()
    assert any(re.search(r"4,096 +~ 1,329 MiB +no +not tried", row) for row in rows)
    assert any(re.search(r"512 +2,000 MiB +no +out of memory", row) for row in rows)


@pytest.fixture
def find_here(command, ray_address, tmp_path, monkeypatch):
    """``find_here(config)``: the tool in this process, with short measurements."""
    monkeypatch.setattr(tokens_command, "_MEASUREMENT", QUICK)

    def find(config, *arguments: str):
        file = tmp_path / "config.yaml"
        file.write_text(dump_config(config))
        return command("tune", "tokens", "--config", file, "--ray.address", ray_address, *PATIENT, *arguments)

    return find


@pytest.mark.slow
def test_training_ends_where_the_memory_does_and_inference_does_not(find_here, store_path, tmp_path):
    config = tiny_config(
        tmp_path,
        data={"store": store_path},
        batch={"tokens": 512, "global_tokens": 1024},
        model={"task": "masked_lm", "backbone": {"layers": 2, "hidden_size": 256, "heads": 4}},
        ray={"num_workers": 1, "cpus_per_worker": 1},
    )
    outcome = find_here(config, "--inference")
    assert outcome.code == 0, outcome.err
    assert "masked_lm, inference in none: 1 worker on cpu, 1 CPU core each" in outcome.out
    assert "no batch could be larger" in outcome.out
    assert "--batch-tokens" in outcome.out
    least_mib = int(re.search(r"^ *512 .* ([\d,]+) MiB", outcome.out, re.MULTILINE)[1].replace(",", ""))

    outcome = find_here(config, "--training.cpu_memory_limit_mib", f"{(least_mib + 200) / (1 - MARGIN):.0f}")
    assert outcome.code == 0, outcome.err
    largest = int(re.search(r"largest that fits +([\d,]+) tokens", outcome.out)[1].replace(",", ""))
    rows = re.findall(r"^ *([\d,]+) .* (yes|no)\b", outcome.out, re.MULTILINE)
    fits = {int(tokens.replace(",", "")): verdict == "yes" for tokens, verdict in rows}
    assert not all(fits.values()), outcome.out
    assert all(verdict == (tokens <= largest) for tokens, verdict in fits.items())
    assert f"--batch.tokens {max(fits)}" not in outcome.out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.yaml"], "nothing is left"


@pytest.mark.slow
def test_classifier_is_measured_and_no_run_is_left(find_here, tmp_path):
    source = labelled_fasta(tmp_path / "labelled.fasta", [20, 40, 60] * 20)
    config = tiny_config(
        tmp_path,
        data={"source": [str(source)], "labels": {"header_field": 1}},
        model={"task": "classifier"},
        ray={"num_workers": 1, "cpus_per_worker": 1},
    )
    outcome = find_here(config)
    assert outcome.code == 0, outcome.err
    assert "classifier, training in none: 1 worker on cpu" in outcome.out
    assert re.search(r"largest that fits +[\d,]+ tokens", outcome.out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.yaml", "labelled.fasta", "stores"]


@pytest.mark.slow
def test_sigterm_while_a_budget_is_measured_ends_the_workers_in_one_line(find_here, store_path, tmp_path, monkeypatch):
    groups = []

    def measure(group, *arguments):
        groups.append(group)
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
        return group_measure(group, *arguments)

    group_measure = measuring_pool._Group.measure
    monkeypatch.setattr(measuring_pool._Group, "measure", measure)
    config = tiny_config(tmp_path, data={"store": store_path}, ray={"num_workers": 1, "cpus_per_worker": 1})
    outcome = find_here(config)
    assert (outcome.code, outcome.out, outcome.err) == (143, "", "interrupted: the workers are ended\n")
    (group,) = groups
    deadline = time.monotonic() + 30  # Ray ends an actor in its own time
    with pytest.raises(RayActorError):
        while time.monotonic() < deadline:
            ray.get(group._actors[0].node.remote(), timeout=30)
