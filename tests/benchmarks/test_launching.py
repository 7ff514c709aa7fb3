"""The launching stage runs the real loop under torchrun, reads its steps and leaves no process behind."""

import subprocess
import sys

import pytest

from benchmarks.launching import Launches, _ended_with_us, make_store, run_program, tokens_per_s
from benchmarks.proteins import read_proteins
from benchmarks.stage import Setting, WrongWorkError


def test_tokens_a_second_weigh_each_step_by_its_time():
    assert tokens_per_s([{"tokens": 100, "step_s": 1.0}, {"tokens": 100, "step_s": 3.0}]) == 50


def test_a_launcher_that_fails_is_told_with_its_last_words():
    with pytest.raises(RuntimeError, match=r"ended with code 3: (.|\n)*out of luck"):
        run_program([sys.executable, "-c", "import sys; print('out of luck'); sys.exit(3)"])


def test_a_launcher_is_asked_to_end_when_the_benchmark_is_stopped():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], text=True)
    with pytest.raises(KeyboardInterrupt), _ended_with_us(process):
        raise KeyboardInterrupt
    assert process.returncode == -15


def test_runs_of_other_losses_are_no_comparison(tmp_path):
    launches = Launches(Setting("cpu", True, tmp_path), tmp_path, workers=2, warmup_steps=1, steps=2)
    launches._compare([3.0, 2.0])
    launches._compare([3.0, 2.0])
    with pytest.raises(WrongWorkError):
        launches._compare([3.0, 2.1])


@pytest.mark.slow
def test_two_processes_of_torchrun_train_the_steps_that_are_measured(tmp_path):
    fasta = tmp_path / "some.fasta"
    fasta.write_text("".join(f">p{number}\n{'MKTAYIAKQR' * (1 + number)}\n" for number in range(60)))
    setting = Setting(device="cpu", quick=True, folder=tmp_path)
    store = make_store(setting, read_proteins(fasta))
    launches = Launches(setting, store, workers=2, warmup_steps=1, steps=1)
    assert launches.with_torchrun() > 0
    assert len(launches.losses[0]) == 2
