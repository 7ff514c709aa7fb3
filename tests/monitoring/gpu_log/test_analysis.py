"""The analysis of a GPU log finds the known problems and no others; a healthy log has none."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from esmeray.monitoring.gpu_log.analysis import GpuSummary, summarise
from esmeray.monitoring.gpu_log.plot import draw_log
from esmeray.monitoring.gpu_log.reader import COLUMNS, read_gpu_log
from tests.monitoring import gpu_traces
from tests.monitoring.gpu_traces import HW_THERMAL, LIMIT_W, MAX_CLOCK_MHZ, START_S, Machine


def summaries(machine: Machine, folder: Path, without: Sequence[str] = ()) -> list[GpuSummary]:
    path = machine.write(folder / f"log-{len(list(folder.iterdir()))}.csv")
    if without:
        table = pd.read_csv(path, dtype=str)
        left_out = tuple(COLUMNS[name][0] for name in without)
        table[[title for title in table if not title.startswith(left_out)]].to_csv(path, index=False)
    return summarise(read_gpu_log(path))


def topics(summary: GpuSummary) -> set[str]:
    return {advice.topic for advice in summary.advice}


def test_the_known_problem_of_each_gpu_is_found_and_no_other(tmp_path):
    for make, topic in (gpu_traces.thermal, "heat"), (gpu_traces.power, "power limit"):
        whole, by_clocks, by_reasons = (
            summaries(make(), tmp_path, without)[0]
            for without in ([], ["throttle_reasons"], ["sm_clock_max_mhz", "power_limit_w"])
        )
        assert topics(whole) == topics(by_clocks) == topics(by_reasons) == {topic}
        assert any("inferred from the clocks" in note for note in by_clocks.notes)
    assert [topics(summary) for summary in summaries(gpu_traces.healthy(), tmp_path)] == [set()] * 2
    assert [topics(summary) for summary in summaries(gpu_traces.waiting(), tmp_path)] == [{"idle"}] * 2


def test_values_are_of_the_time_at_work(tmp_path):
    machine = gpu_traces.thermal()
    machine.idle(100, 30)
    (summary,) = summaries(machine, tmp_path)
    assert summary.values["work_s"] == pytest.approx(300, abs=2)
    assert summary.values["idle"] == pytest.approx(0.1, abs=0.01)
    assert summary.values["utilisation"] == pytest.approx(0.9 * 0.97, abs=0.01)
    assert summary.values["thermal"] == pytest.approx(150 / 270, abs=0.01)
    assert summary.spans_s["thermal"] == [(pytest.approx(START_S + 150, abs=1), pytest.approx(START_S + 300, abs=1))]
    assert summary.values["memory_peak_bytes"] == pytest.approx(0.8 * 80 * 2**30, rel=0.01)
    assert summary.values["temperature_max_c"] == pytest.approx(87, abs=3)
    assert summary.values["clock_share"] == pytest.approx((120 + 150 * 0.75) / 270, abs=0.01)


def test_throttling_memory_and_load_are_judged(tmp_path):
    short, hot, hungry = Machine(), Machine(), Machine()
    short.reasons[:, 100:110] = HW_THERMAL
    hot.reasons[:, 100:200] = hungry.reasons[:, 100:200] = 0x8
    hot.temperature[:, 100:200] = 88
    hungry.power[:, 100:200], hungry.clock[:, 100:200] = LIMIT_W, 1000
    little, slow, cold, broken = Machine(), Machine(), Machine(), Machine()
    little.memory[:] = 0.35
    slow.util *= 0.55
    cold.power[:] = 200
    reported = [topics(*summaries(machine, tmp_path)) for machine in (short, hot, hungry, little, slow, cold)]
    assert reported == [{"heat"}, {"heat"}, {"power limit"}, {"memory unused"}, {"utilisation"}, {"light load"}]
    cool, set_low, capped = Machine(), Machine(), gpu_traces.power()
    cool.clock[:] = 1500
    set_low.clock[:], set_low.reasons[:], set_low.temperature[:] = 1200, 0x2, 84
    capped.clock[:] = MAX_CLOCK_MHZ  # a power limit that costs no speed
    assert [topics(*summaries(machine, tmp_path)) for machine in (cool, set_low, capped)] == [set()] * 3
    broken.uncorrected[:, 150:] = 2
    (summary,) = summaries(broken, tmp_path)
    assert summary.notes == ["2 uncorrected memory errors, the first after 150 s: later results may be wrong"]


def test_gpu_that_does_nothing_but_a_stray_kernel_is_noted(tmp_path):
    machine = Machine(gpus=2)
    machine.util[1] = 1
    machine.util[1, 100] = 90
    first, second = summaries(machine, tmp_path)
    assert first.notes == []
    assert second.notes[0].startswith("was never used")
    assert (topics(second), second.values["work_s"], second.values["idle"]) == (set(), 0.0, None)


def test_a_gap_in_the_log_is_not_idle_time(tmp_path):
    path = gpu_traces.healthy().write(tmp_path / "log.csv")
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[:200] + lines[300:]) + "\n")
    assert [topics(summary) for summary in summarise(read_gpu_log(path))] == [set(), set()]
    path.write_text("\n".join([lines[0], lines[101]]) + "\n")
    log = read_gpu_log(path)
    (summary,) = summarise(log)
    assert any("uncertain" in note for note in summary.notes)
    draw_log(log, [summary], tmp_path / "few.png")


@pytest.mark.slow
def test_the_plot_has_the_samples_and_shades_idle_stretches(saved_figures, tmp_path):
    log = read_gpu_log(gpu_traces.healthy().write(tmp_path / "log.csv"))
    spans = {"idle": [(60.0, 120.0)], "thermal": [], "power_capped": []}
    draw_log(log, [summarise(log)[0]._replace(spans_s=spans)], tmp_path / "log.png")
    panels = saved_figures[0].axes
    unit = {"Time (s)": 1.0, "Time (min)": 60.0}[panels[-1].get_xlabel()]
    for axes, metric in zip(
        panels, ("util", "mem_used_bytes", "temperature_c", "power_w", "sm_clock_mhz"), strict=True
    ):
        for (label, table), line in zip(log.gpus.items(), axes.lines, strict=False):
            assert line.get_label() == f"GPU {label}"
            values = table[metric] / (2.0**30 if metric == "mem_used_bytes" else 1.0)
            np.testing.assert_allclose(line.get_xydata(), np.stack([table["time"] / unit, values], axis=1))
    (shade,) = panels[0].patches
    assert [shade.get_x() * unit, shade.get_width() * unit] == pytest.approx([60, 60])
