"""Settings of the samples that are taken while a run trains, of its alerts and of its memory guard."""

from typing import Annotated

from pydantic import Field

from train_config.section import NonNegativeInt, PositiveFloat, Section

Percent = Annotated[float, Field(ge=0, le=100)]


class AlertsSection(Section):
    """Warnings of a NaN, an idle GPU and nearly full memory; each comes again only after its cause was over."""

    enabled: bool = True
    """Warn at the terminal and in W&B."""
    utilization_percent: Percent = 50.0
    """GPU utilisation under which a warning comes, percent."""
    utilization_window_s: PositiveFloat = 120.0
    """Seconds that it has to stay under it."""
    memory_percent: Percent = 95.0
    """Share of a device's or the host's memory in use, percent."""


class MonitoringSection(Section):
    """Samples of a run while it trains, taken every training.gpu_log_interval seconds."""

    prometheus: bool = True
    """Export the metrics through Ray's Prometheus port."""
    peak_tflops: PositiveFloat | None = None
    """Peak of one device in the precision trained in, TFLOP/s, for the model FLOPs utilisation. Default: that of known
    GPUs; elsewhere the utilisation is left out."""
    alerts: AlertsSection = AlertsSection()


class MemoryGuardSection(Section):
    """Handling of out of memory while training."""

    enabled: bool = True
    """Repeat the step that ran out of memory with its batches in halves, and keep the halves: the optimizer's step and
    its result stay the same. Where workers already wait for each other, resume from the last checkpoint."""
    max_halvings: NonNegativeInt = 3
    """Times that batches may be halved in a run."""
