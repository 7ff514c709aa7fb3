"""Settings of what is watched while a run trains, and of what is told when something is wrong."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from train_config.section import NonNegativeInt, PositiveFloat, Section

Percent = Annotated[float, Field(ge=0, le=100)]


class AlertsSection(Section):
    """When to warn. Each warning comes once, and again only after what it tells of was over."""

    enabled: bool = True
    """Warn at the terminal and in W&B."""
    utilization_percent: Percent = 50.0
    """GPU utilisation under which a warning comes, percent."""
    utilization_window_s: PositiveFloat = 120.0
    """Seconds that it has to stay under it."""
    memory_percent: Percent = 95.0
    """Share of a device's or the host's memory in use, percent."""
    leak_percent_per_epoch: PositiveFloat = 2.0
    """Growth of a worker's peak memory from epoch to epoch that counts as a leak, percent."""
    silent_worker_s: PositiveFloat = 120.0
    """Seconds without a sample after which a worker is told."""


class MonitoringSection(Section):
    """What is watched while a run trains; training.gpu_log_interval says how often."""

    prometheus: bool = True
    """Export the figures through Ray's Prometheus port."""
    peak_tflops: PositiveFloat | None = None
    """Peak of one device in the precision trained in, TFLOP/s, for the model FLOPs utilisation. Default: that of known
    GPUs; elsewhere the utilisation is left out."""
    alerts: AlertsSection = AlertsSection()


class MemoryGuardSection(Section):
    """What happens when memory runs out while training."""

    enabled: bool = True
    """Take the step in which memory ran out again, with batches in halves, and go on with halves: the optimizer's step
    and its result stay the same. Where workers already wait for each other, go back to the last checkpoint for it."""
    max_halvings: NonNegativeInt = 3
    """Times that batches may be halved in a run."""
