"""Columns of a GPU log, which is CSV as ``nvidia-smi --query-gpu=... --format=csv`` writes it."""

from typing import NamedTuple


class Column(NamedTuple):
    """nvidia-smi's name of a metric and the unit that it writes behind a value, with other names for the same."""

    title: str
    unit: str = ""
    other_titles: tuple[str, ...] = ()

    @property
    def header(self) -> str:
        """``utilization.gpu [%]``."""
        return f"{self.title} [{self.unit}]" if self.unit else self.title


TIME, GPU, UUID, NAME = "time", "index", "uuid", "name"
COLUMNS = {
    TIME: Column("timestamp"),
    GPU: Column("index"),
    UUID: Column("uuid", other_titles=("gpu_uuid",)),
    NAME: Column("name", other_titles=("gpu_name",)),
    "util_percent": Column("utilization.gpu", "%"),
    "mem_util_percent": Column("utilization.memory", "%"),
    "mem_used_bytes": Column("memory.used", "MiB"),
    "mem_total_bytes": Column("memory.total", "MiB"),
    "temperature_c": Column("temperature.gpu"),
    "power_w": Column("power.draw", "W", ("power.draw.average", "power.draw.instant")),
    "power_limit_w": Column("enforced.power.limit", "W", ("power.limit",)),
    "sm_clock_mhz": Column("clocks.current.sm", "MHz", ("clocks.sm", "clocks.gr", "clocks.current.graphics")),
    "sm_clock_max_mhz": Column("clocks.max.sm", "MHz", ("clocks.max.gr", "clocks.max.graphics")),
    "memory_clock_mhz": Column("clocks.current.memory", "MHz", ("clocks.mem",)),
    "throttle_reasons": Column("clocks_event_reasons.active", "", ("clocks_throttle_reasons.active",)),
    "ecc_corrected": Column("ecc.errors.corrected.volatile.total"),
    "ecc_uncorrected": Column("ecc.errors.uncorrected.volatile.total"),
}
"""By the metric's name in :class:`~monitoring.sampling.nvml.GpuSample`; of several titles the first present is read."""
REQUIRED = (TIME, GPU, "util_percent", "mem_used_bytes", "mem_total_bytes", "temperature_c", "power_w", "sm_clock_mhz")
FACTORS = {"B": 1.0, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "%": 1.0, "W": 1.0, "MHz": 1.0, "C": 1.0}
"""Units in the metrics' own."""
REASON_BITS = {
    "applications_clocks_setting": 0x2,
    "sw_power_cap": 0x4,
    "hw_slowdown": 0x8,
    "sync_boost": 0x10,
    "sw_thermal_slowdown": 0x20,
    "hw_thermal_slowdown": 0x40,
    "hw_power_brake_slowdown": 0x80,
}
"""nvidia-smi's columns for a single reason (``clocks_event_reasons.sw_power_cap``), with NVML's bit."""
