"""Programs that compute in alternate slices, and what is counted of them."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from benchmarks import slices as module
from benchmarks.process_family import ProcessFamily
from benchmarks.slices import SlicedProgram, Slices, speed_of
from tests.benchmarks import counting_program

PATIENCE_S = 10.0


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., SlicedProgram]]:
    """Starts counting programs of this name and these seconds a step; ends them."""
    started = []

    def begin(name: str, step_s: float = 0.01) -> SlicedProgram:
        family, folder = ProcessFamily(), tmp_path / name
        command = [sys.executable, "-S", counting_program.__file__, str(folder), str(step_s), "0", ""]
        started.append((family, subprocess.Popen(command, env=dict(family.variables), text=True)))
        program = SlicedProgram(family, folder / "metrics.jsonl")
        wait_until(lambda: len(program.new_steps()) > 0)
        return program

    yield begin
    for family, process in started:
        family.ask_to_end(process)
        family.end(process, PATIENCE_S)
        assert not family.living()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def states(family: ProcessFamily) -> set[str]:
    return {process.status() for process in family.living()}


def test_all_processes_of_a_program_are_stopped_and_continued_also_one_that_hides_its_environment(start):
    family = start("a").family
    assert len(family.living()) == 2
    family.stop()
    wait_until(lambda: states(family) == {psutil.STATUS_STOPPED})
    family.go_on()
    wait_until(lambda: psutil.STATUS_STOPPED not in states(family))


def test_child_whose_parent_is_gone_is_still_of_the_family():
    family = ProcessFamily()
    orphan = "import subprocess, sys; subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(600)'])"
    parent = subprocess.Popen([sys.executable, "-S", "-c", orphan], env=dict(family.variables), text=True)
    parent.wait()
    (child,) = family.living()
    assert child.pid != parent.pid
    family.end(parent, PATIENCE_S)
    assert not family.living()


def test_only_one_program_computes_at_a_time(start):
    programs = {"a": start("a"), "b": start("b")}
    slices = Slices(programs, slice_s=0.1, settle_s=0.0)
    for name, other in ("ab", "ba", "ba", "ab"):
        assert slices.speed(name) > 0
        wait_until(lambda other=other: states(programs[other].family) == {psutil.STATUS_STOPPED})
        assert psutil.STATUS_STOPPED not in states(programs[name].family)


def test_speed_is_that_of_whole_steps_within_a_slice(start):
    """The program does nothing but wait 20 ms a step of 10 tokens."""
    slices = Slices({"a": start("a", 0.02), "b": start("b", 0.02)}, slice_s=0.3, settle_s=0.05)
    speeds = [slices.speed(name) for name in ("a", "b", "b", "a")]
    assert all(0 < speed <= 500 for speed in speeds)


def test_time_between_steps_counts_and_the_step_that_a_stop_fell_into_does_not():
    records = [{"tokens": 1000, "time": 10.0}, {"tokens": 100, "time": 11.0}, {"tokens": 200, "time": 13.0}]
    assert speed_of(records) == 100


def test_slice_goes_on_until_it_holds_enough_steps(start):
    program = start("a", 0.05)
    before = len(program.losses)
    Slices({"a": program}, slice_s=0.01).speed("a")
    assert len(program.losses) - before > module.LEAST_STEPS


def test_program_without_steps_is_told(start, monkeypatch):
    monkeypatch.setattr(module, "LONGEST_S", 0.2)
    programs = {"a": start("a"), "b": start("b")}
    slices = Slices(programs, slice_s=0.05, settle_s=0.0)
    slices.speed("b")
    programs["b"].family.stop()
    with pytest.raises(RuntimeError, match="0 steps"):
        slices.speed("b")


def test_program_that_does_not_do_what_it_should_breaks_its_slice(start):
    def refuse() -> None:
        raise ValueError("not watched")

    program = start("a")
    program.check = refuse
    with pytest.raises(ValueError, match="not watched"):
        Slices({"a": program}, slice_s=0.05).speed("a")


def test_cpu_time_is_counted_that_of_the_computing_threads_apart(tmp_path):
    """One thread computes all the time, one some of it, and writes the steps."""
    program = """
import hashlib, json, sys, threading, time
def compute(share):
    while True:
        end = time.monotonic() + 0.02 * share
        while time.monotonic() < end:
            hashlib.sha256(bytes(1_000_000)).digest()
        time.sleep(0.02 * (1 - share) + 1e-6)
threading.Thread(target=compute, args=(1.0,), daemon=True).start()
threading.Thread(target=compute, args=(0.2,), daemon=True).start()
with open(sys.argv[1], "w", buffering=1) as metrics:
    for step in range(100_000):
        time.sleep(0.01)
        record = {"kind": "train", "step": step, "tokens": 10, "loss": 1.0, "time": time.time()}
        metrics.write(json.dumps(record) + "\\n")
"""
    family, metrics = ProcessFamily(), tmp_path / "metrics.jsonl"
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", program, str(metrics)], env=dict(family.variables), text=True
    )
    try:
        sliced = SlicedProgram(family, metrics)
        wait_until(lambda: metrics.exists() and len(sliced.new_steps()) > 0)
        speed = sliced.speed(1.0)
    finally:
        family.end(process, 0.0)
    assert sliced.tokens >= speed * 1.0
    assert 0 < sliced.beside_s < 0.5 * sliced.cpu_s
