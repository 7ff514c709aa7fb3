"""Columns of a GPU log: Esmeray's own names, and those of ``nvidia-smi --query-gpu``."""

from __future__ import annotations

from dataclasses import fields

from monitoring.sampling.nvml import GpuSample

TIME, HOST, GPU, UUID, NAME = "time", "host", "gpu", "uuid", "name"
GPU_METRICS = tuple(field.name for field in fields(GpuSample) if field.name not in ("index", UUID, NAME))
HOST_METRICS = (
    "cpu_percent",
    "host_total_bytes",
    "host_available_bytes",
    "host_used_bytes",
    "disk_read_bytes_per_s",
    "disk_write_bytes_per_s",
    "net_sent_bytes_per_s",
    "net_received_bytes_per_s",
    "watched_rss_bytes",
    "watched_cpu_percent",
)
"""Columns of the whole machine, and (watched) of the processes given by ``--pid`` and their children."""
COLUMNS = (TIME, HOST, GPU, UUID, NAME, *GPU_METRICS, *HOST_METRICS)
"""Esmeray's own header, in order."""
REQUIRED = (TIME, "util_percent", "mem_used_bytes", "mem_total_bytes", "temperature_c", "power_w", "sm_clock_mhz")
OTHER_NAMES: dict[str, tuple[str, ...]] = {
    TIME: ("timestamp",),
    GPU: ("index",),
    UUID: ("gpu_uuid",),
    NAME: ("gpu_name",),
    "util_percent": ("utilization.gpu",),
    "mem_util_percent": ("utilization.memory",),
    "mem_used_bytes": ("memory.used",),
    "mem_total_bytes": ("memory.total",),
    "temperature_c": ("temperature.gpu",),
    "power_w": ("power.draw", "power.draw.average", "power.draw.instant"),
    "power_limit_w": ("enforced.power.limit", "power.limit"),
    "sm_clock_mhz": ("clocks.sm", "clocks.current.sm", "clocks.gr", "clocks.current.graphics"),
    "sm_clock_max_mhz": ("clocks.max.sm", "clocks.max.gr", "clocks.max.graphics"),
    "memory_clock_mhz": ("clocks.mem", "clocks.current.memory"),
    "throttle_reasons": ("clocks_event_reasons.active", "clocks_throttle_reasons.active"),
}
"""nvidia-smi's names, without the unit in brackets; of several the first one present is used."""
REASON_BITS = {
    "applications_clocks_setting": 0x2,
    "sw_power_cap": 0x4,
    "hw_slowdown": 0x8,
    "sync_boost": 0x10,
    "sw_thermal_slowdown": 0x20,
    "hw_thermal_slowdown": 0x40,
    "hw_power_brake_slowdown": 0x80,
}
"""nvidia-smi's columns of one reason each (``clocks_event_reasons.sw_power_cap``), with NVML's bit."""
