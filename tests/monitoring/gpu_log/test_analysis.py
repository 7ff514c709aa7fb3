"""What is wrong in a log of known trouble is found, and nothing else; in a healthy one nothing is."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from monitoring.gpu_log.analysis import Analysis, GpuDiagnosis, analyse
from monitoring.gpu_log.busy_time import BusyTime
from monitoring.gpu_log.memory_growth import lasting_growth
from monitoring.gpu_log.plot import draw_analysis
from monitoring.gpu_log.reader import read_gpu_log
from tests.monitoring import gpu_traces
from tests.monitoring.gpu_traces import HW_THERMAL, LIMIT_W, START_S, TRACES, Machine

SEEDS = range(4)
OF_THE_MACHINE = ("cpu_", "host_", "disk_", "net_", "watched_")


def diagnose(machine: Machine, folder: Path) -> Analysis:
    return analyse(read_gpu_log(machine.write(folder / "log.csv")))


def names(diagnosis: GpuDiagnosis) -> list[str]:
    return [finding.name for finding in diagnosis.findings]


def without(path: Path, drop: Callable[[str], bool]) -> Path:
    """The log without some of its columns."""
    with path.open(newline="") as file:
        rows = list(csv.reader(file))
    kept = [place for place, name in enumerate(rows[0]) if not drop(name)]
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([[row[place] for place in kept] for row in rows])
    return path


def thinned(path: Path, every: int) -> Path:
    """The log of one GPU as if sampled more rarely."""
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], *lines[1::every]]) + "\n")
    return path


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", TRACES)
def test_what_is_wrong_is_found_on_each_gpu_and_nothing_else(name, seed, tmp_path):
    make, expected = TRACES[name]
    for diagnosis in diagnose(make(seed), tmp_path).gpus:
        assert set(names(diagnosis)) == expected


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ["thermal", "power"])
def test_throttling_is_told_by_clocks_where_there_are_no_reasons(name, seed, tmp_path):
    path = without(TRACES[name][0](seed).write(tmp_path / "log.csv"), lambda column: column == "throttle_reasons")
    (diagnosis,) = analyse(read_gpu_log(path)).gpus
    assert set(names(diagnosis)) == TRACES[name][1]
    assert "(told by clocks)" in diagnosis.findings[0].message
    assert any("by clocks alone" in note for note in diagnosis.notes)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ["thermal", "power"])
def test_throttling_is_told_by_reasons_where_no_limit_and_no_highest_clock_is_known(name, seed, tmp_path):
    unknown = {"sm_clock_max_mhz", "power_limit_w"}
    path = without(TRACES[name][0](seed).write(tmp_path / "log.csv"), lambda column: column in unknown)
    (diagnosis,) = analyse(read_gpu_log(path)).gpus
    assert set(names(diagnosis)) == TRACES[name][1]


def test_cost_of_throttling_is_its_time_and_its_clocks(tmp_path):
    (diagnosis,) = diagnose(gpu_traces.thermal(), tmp_path).gpus
    (finding,) = diagnosis.findings
    assert finding.lost_share == pytest.approx(0.5 * (1 - 1485 / 1980), abs=0.01)
    ((start, end),) = finding.spans_s
    assert (start, end) == (pytest.approx(START_S + 300, abs=2), pytest.approx(START_S + 600, abs=2))


def test_power_cap_that_costs_no_clock_is_how_cards_run(tmp_path):
    machine = gpu_traces.power()
    machine.clock[:] = gpu_traces.MAX_CLOCK_MHZ
    (diagnosis,) = diagnose(machine, tmp_path).gpus
    assert names(diagnosis) == []


def test_slow_clocks_of_a_cool_gpu_far_from_its_limit_are_no_throttling(tmp_path):
    machine = gpu_traces.healthy()
    machine.clock[:] = 1500
    assert [names(diagnosis) for diagnosis in diagnose(machine, tmp_path).gpus] == [[], []]


def test_clocks_that_somebody_holds_are_told_as_such(tmp_path):
    machine = Machine()
    machine.clock[:], machine.reasons[:], machine.temperature[:] = 1200, 0x2, 84
    (diagnosis,) = diagnose(machine, tmp_path).gpus
    assert names(diagnosis) == ["held_clocks"]


def test_short_heat_is_found_by_its_reason(tmp_path):
    machine = Machine()
    machine.reasons[:, START_S + 300 : START_S + 310] = HW_THERMAL
    (diagnosis,) = diagnose(machine, tmp_path).gpus
    assert names(diagnosis) == ["thermal_throttling"]


def test_unspecific_slowdown_goes_by_temperature_and_power(tmp_path):
    hot, hungry = Machine(), Machine()
    hot.reasons[:, 100:200] = hungry.reasons[:, 100:200] = 0x8
    hot.temperature[:, 100:200] = 88
    hungry.power[:, 100:200] = LIMIT_W
    hungry.clock[:, 100:200] = 1000
    assert names(diagnose(hot, tmp_path).gpus[0]) == ["thermal_throttling"]
    (tmp_path / "log.csv").unlink()
    assert names(diagnose(hungry, tmp_path).gpus[0]) == ["power_throttling"]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("name", "expected"), [("loader", "loader_gaps"), ("checkpoint", "periodic_gaps"), ("sync", "sync_gaps")]
)
def test_without_the_machines_figures_gaps_are_judged_by_their_pattern(name, expected, seed, tmp_path):
    path = without(TRACES[name][0](seed).write(tmp_path / "log.csv"), lambda column: column.startswith(OF_THE_MACHINE))
    for diagnosis in analyse(read_gpu_log(path)).gpus:
        (finding,) = diagnosis.findings
        assert finding.name == expected
        assert name == "sync" or "by their pattern alone" in finding.message


def test_checkpoints_are_phases_with_their_period(tmp_path):
    diagnosis = diagnose(gpu_traces.checkpoint(), tmp_path).gpus[0]
    kinds = [phase.kind for phase in diagnosis.phases]
    assert kinds == ["start-up", *["steady", "checkpoint"] * 11, "steady", "end"]
    assert "11 gaps of 8 s, every 100 s" in diagnosis.findings[0].message
    for before, after in zip(diagnosis.phases, diagnosis.phases[1:], strict=False):
        assert before.end_s == after.start_s


def test_checkpoint_to_another_machine_is_seen_on_the_network(tmp_path):
    machine = gpu_traces.checkpoint()
    path = machine.write(tmp_path / "log.csv")
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        row["net_sent_bytes_per_s"], row["disk_write_bytes_per_s"] = row["disk_write_bytes_per_s"], "0"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)
    diagnosis = analyse(read_gpu_log(path)).gpus[0]
    assert names(diagnosis) == ["checkpoint_gaps"]
    assert "sent over the network" in diagnosis.findings[0].message


def test_loader_that_waits_for_the_disk_is_found_with_idle_cpus(tmp_path):
    machine = Machine()
    for place in range(5, 590, 9):
        machine.disk_read[machine.idle(0, place + place % 3, 2)] = 4e8
    (diagnosis,) = diagnose(machine, tmp_path).gpus
    assert names(diagnosis) == ["loader_gaps"]
    assert "read from disk" in diagnosis.findings[0].message


def test_one_gpu_whose_loader_is_slow_is_not_taken_for_turns(tmp_path):
    machine = Machine(gpus=2)
    for place in range(5, 590, 9):
        machine.cpu[machine.idle(1, place + place % 3, 2)] = 95
    other, slow = diagnose(machine, tmp_path).gpus
    assert names(other) == []
    assert names(slow) == ["loader_gaps"]


def test_long_pause_is_an_idle_phase_without_a_cause(tmp_path):
    machine = Machine()
    machine.idle(0, 200, 90)
    (diagnosis,) = diagnose(machine, tmp_path).gpus
    assert [phase.kind for phase in diagnosis.phases] == ["start-up", "steady", "idle", "steady", "end"]
    assert names(diagnosis) == ["unknown_gaps"]


@pytest.mark.parametrize("seed", SEEDS)
def test_troubles_that_come_together_are_all_found(seed, tmp_path):
    machine = gpu_traces.loader(seed)
    machine.memory[:, machine.working] = np.linspace(0.5, 0.9, 600)
    machine.reasons[0, 300:500], machine.temperature[0, 300:500], machine.clock[0, 300:500] = HW_THERMAL, 90, 1200
    for place in range(100, 600, 100):
        machine.disk_write[machine.idle(slice(None), place, 8)] = 1e9
    first, second = diagnose(machine, tmp_path).gpus
    assert set(names(first)) == {"loader_gaps", "checkpoint_gaps", "memory_leak", "thermal_throttling"}
    assert set(names(second)) == {"loader_gaps", "checkpoint_gaps", "memory_leak"}
    costs = [finding.lost_share for finding in first.findings]
    assert costs == sorted(costs, reverse=True)


def test_trace_of_the_picture_is_diagnosed(tmp_path):
    cool, hot = diagnose(gpu_traces.troubled(), tmp_path).gpus
    assert set(names(cool)) == {"loader_gaps", "checkpoint_gaps", "memory_leak"}
    assert set(names(hot)) == {"loader_gaps", "checkpoint_gaps", "memory_leak", "thermal_throttling"}


@pytest.mark.parametrize("every", [2, 5])
@pytest.mark.parametrize("name", ["thermal", "power", "leak"])
def test_rarer_samples_tell_the_same(name, every, tmp_path):
    path = thinned(TRACES[name][0](0).write(tmp_path / "log.csv"), every)
    (diagnosis,) = analyse(read_gpu_log(path)).gpus
    assert set(names(diagnosis)) == TRACES[name][1]


@pytest.mark.parametrize("seed", SEEDS)
def test_memory_that_fills_a_cache_and_stays_is_no_leak(seed, tmp_path):
    machine = Machine(1200, seed=seed)
    machine.memory[:, machine.working] = 0.8 - 0.4 * np.exp(-np.linspace(0, 14, 1200))
    (diagnosis,) = diagnose(machine, tmp_path).gpus
    assert names(diagnosis) == []


def test_pace_of_a_leak_is_right(tmp_path):
    (diagnosis,) = diagnose(gpu_traces.leak(), tmp_path).gpus
    message = diagnosis.findings[0].message
    grown = 0.4 * 80 / 1200 * 3600
    assert float(message.split("grows by ")[1].split(" ")[0]) == pytest.approx(grown, rel=0.02)


def test_outliers_do_not_turn_the_slope():
    time_s, used = np.arange(2400.0), np.linspace(20e9, 40e9, 2400)
    for block in (6, 15):
        used[block * 100 : block * 100 + 100] = 60e9
    growth = lasting_growth(time_s, used, 80e9)
    assert growth is not None
    assert growth.bytes_per_s == pytest.approx(20e9 / 2400, rel=0.2)


@pytest.mark.parametrize("seed", SEEDS)
def test_noise_alone_is_no_leak(seed):
    random = np.random.default_rng(seed)
    walk = 40e9 + random.normal(0, 2e9, 3600)
    assert lasting_growth(np.arange(3600.0), walk, 80e9) is None


def test_little_memory_and_nearly_all_of_it_are_told(tmp_path):
    machine = Machine(gpus=2)
    machine.memory[0, machine.working], machine.memory[1, machine.working] = 0.35, 0.97
    little, much = diagnose(machine, tmp_path).gpus
    assert names(little) == ["memory_unused"]
    assert "35 %" in little.findings[0].message
    assert names(much) == ["memory_near_limit"]


def test_gpu_beside_that_does_nothing_is_told(tmp_path):
    machine = Machine(gpus=2)
    machine.busy[1] = False
    first, second = diagnose(machine, tmp_path).gpus
    assert names(first) == []
    assert names(second) == ["unused"]
    assert [phase.kind for phase in second.phases] == ["unused"]


def test_short_run_in_a_long_log_is_looked_at():
    working = np.full(100_000, 1.0)
    working[60_000:63_000] = 90.0
    long_log = BusyTime(np.arange(100_000.0), working)
    assert long_log.level_percent == 90.0
    assert (long_log.work.first, long_log.work.last) == (60_000, 63_000)
    working[60_000:63_000] = 1.0
    working[60_000:60_003] = 90.0
    assert BusyTime(np.arange(100_000.0), working).level_percent == 0.0, "a stray kernel is no run"


def test_waits_shorter_than_a_sample_show_as_low_utilisation(tmp_path):
    machine = Machine()
    samples = machine.samples()
    machine.samples = lambda: {**samples, "util": samples["util"] * 0.55}  # type: ignore[method-assign]
    (diagnosis,) = diagnose(machine, tmp_path).gpus
    assert names(diagnosis) == ["low_utilization"]


def test_kernels_that_leave_the_chip_cold_are_told(tmp_path):
    machine = Machine()
    machine.power[:] = 200
    (diagnosis,) = diagnose(machine, tmp_path).gpus
    assert names(diagnosis) == ["light_load"]


def test_memory_errors_are_told_with_their_moment(tmp_path):
    machine = Machine()
    machine.uncorrected[:, 400:] = 2
    (diagnosis,) = diagnose(machine, tmp_path).gpus
    (finding,) = diagnosis.findings
    assert finding.message == "2 uncorrected memory errors"
    assert finding.spans_s[0][0] == pytest.approx(400, abs=1)


def test_memory_of_the_machine_that_grows_is_noted(tmp_path):
    path = Machine().write(tmp_path / "log.csv")
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    for place, row in enumerate(rows):
        row["watched_rss_bytes"] = str(2**30 * (10 + place // 10))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)
    (note,) = analyse(read_gpu_log(path)).notes
    assert note.startswith("memory of the watched processes grows by ")
    assert float(note.split("grows by ")[1].split(" ")[0]) == pytest.approx(360, rel=0.02)


def test_hole_in_the_log_is_no_gap(tmp_path):
    path = gpu_traces.healthy().write(tmp_path / "log.csv")
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[:400] + lines[800:]) + "\n")
    assert [names(diagnosis) for diagnosis in analyse(read_gpu_log(path)).gpus] == [[], []]


@pytest.mark.parametrize("rows", [1, 2, 3, 8])
def test_log_of_few_samples_is_read_and_said_to_be_one(rows, tmp_path):
    path = Machine().write(tmp_path / "log.csv")
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], *lines[100 : 100 + rows]]) + "\n")
    log = read_gpu_log(path)
    analysis = analyse(log)
    assert any("few" in note for note in analysis.gpus[0].notes)
    draw_analysis(log, analysis, tmp_path / "few.png")


def test_picture_is_drawn_of_every_trace(tmp_path):
    import matplotlib.image

    for name, (make, _) in TRACES.items():
        log = read_gpu_log(make(0).write(tmp_path / f"{name}.csv"))
        draw_analysis(log, analyse(log), tmp_path / f"{name}.png")
        height, width, _ = matplotlib.image.imread(tmp_path / f"{name}.png").shape
        assert height > 600
        assert width > 1000
