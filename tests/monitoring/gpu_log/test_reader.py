"""An nvidia-smi log is read up to its last complete sample, or refused with the name of a missing column."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from esmeray.common.errors import DataError
from esmeray.monitoring.gpu_log.reader import read_gpu_log

SMI_QUERY = (
    "timestamp, index, name, utilization.gpu [%], memory.used [MiB], memory.total [MiB], temperature.gpu, "
    "power.draw [W], enforced.power.limit [W], clocks.current.sm [MHz], clocks.max.sm [MHz], "
    "clocks_event_reasons.active"
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "log.csv"


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


def smi(second: int, index: int = 0, *, util: str = "93 %", reasons: str = "0x0000000000000004") -> str:
    clock = f"2024/05/01 12:00:{second:02d}.250"
    return (
        f"{clock}, {index}, NVIDIA H100, {util}, 40960 MiB, 81559 MiB, 61, 512.33 W, 700.00 W, 1700 MHz, 1980 MHz, "
        f"{reasons}"
    )


def test_nvidia_smi_logs_are_read_with_their_units(path):
    write(path, SMI_QUERY, *(smi(second, index) for second in range(3) for index in (0, 1)))
    log = read_gpu_log(path)
    assert log.start == "2024/05/01 12:00:00.250"
    assert list(log.gpus) == ["0", "1"]
    trace = log.gpus["0"]
    assert trace["time"].tolist() == [0, 1, 2]
    assert trace["mem_used_bytes"][0] == 40960 * 2**20
    assert trace["power_limit_w"][0] == 700
    assert trace["sm_clock_mhz"][0] == 1700
    assert trace["throttle_reasons"][0] == 4
    bare = [line.replace(" %,", ",").replace(" MiB", "").replace(" W,", ",") for line in path.read_text().splitlines()]
    write(path, SMI_QUERY, *(line.replace(" MHz", "") for line in bare[1:]))
    pd.testing.assert_frame_equal(read_gpu_log(path).gpus["0"], trace)


def test_missing_columns_are_named_with_the_nearest_and_all_columns(path):
    write(path, "timestamp,index,utilization.gpu,mem.used [MiB],memory.total,temp.gpu [C],power.draw", "1,0,2,3,4,5,6")
    with pytest.raises(DataError) as error:
        read_gpu_log(path)
    message = str(error.value)
    assert (
        "no column for memory.used (did you mean mem.used?); temperature.gpu (did you mean temp.gpu?); clocks"
        in message
    )
    assert (
        "The log has: timestamp, index, utilization.gpu, mem.used [MiB], memory.total, temp.gpu [C], power.draw."
        in message
    )
    assert "\n" not in message


def test_columns_of_single_throttle_reasons_are_combined(path):
    header = SMI_QUERY.replace("event_reasons.active", "throttle_reasons.sw_power_cap")
    header += ", clocks_throttle_reasons.hw_thermal_slowdown"
    lines = [smi(0, reasons="Active") + ", Active", smi(1, reasons="Not Active") + ", Active"]
    trace = read_gpu_log(write(path, header, *lines)).gpus["0"]
    assert trace["throttle_reasons"].tolist() == [0x44, 0x40]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lines: [lines[0], lines[1].replace("93 %", "high"), lines[2]], "line 2, column 'utilization.gpu [%]'"),
        (lambda lines: [lines[0], lines[1], lines[2].replace(", 61", "")], "row 2: 11 fields, but the header has 12"),
        (lambda lines: [lines[0], lines[1].replace("2024/05/01", "yesterday")], "line 2, column 'timestamp'"),
        (lambda lines: [lines[0], lines[1].replace("512.33 W", "0.5 kW")], "'0.5 kW' is not a number"),
        (lambda lines: lines[:1], "a header but no samples"),
        (lambda lines: [""], "is empty"),
    ],
)
def test_damage_is_reported_with_line_and_column(path, change, message):
    write(path, *change([SMI_QUERY, smi(0), smi(1)]))
    with pytest.raises(DataError) as error:
        read_gpu_log(path)
    assert message in str(error.value)


def test_damaged_lines_of_a_gpu_log_are_passed_over(path):
    text = "\r\n".join([SMI_QUERY, smi(0), SMI_QUERY, smi(1)]) + "\r\n" + smi(2)[:40]
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert read_gpu_log(path).gpus["0"]["time"].tolist() == [0, 1]
    write(path, SMI_QUERY, smi(5, util="[N/A]"), smi(6), smi(2), smi(3, util="[GPU is lost]"))
    trace = read_gpu_log(path).gpus["0"]
    assert trace["time"].tolist() == [0, 1, 3, 4]
    assert np.isnan(trace["util"]).tolist() == [False, True, True, False], "what the driver does not know"
