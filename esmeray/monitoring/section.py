"""Settings of what is watched while a run trains: W&B, samples and alerts."""

from typing import Annotated, Literal

from pydantic import Field

from esmeray.train_config.section import PositiveFloat, Section

Percent = Annotated[float, Field(ge=0, le=100)]


class WandbSection(Section):
    """Weights & Biases. It can neither stop nor slow a run."""

    mode: Literal["offline", "online", "disabled"] = "offline"
    """offline: to a file, for 'wandb sync'; online: to the server (what it does not take can be uploaded from the run's
    folder later); disabled."""
    project: str = "esmeray"
    """W&B project that the run belongs to."""
    entity: str | None = None
    """User or team that the W&B project is of. Default: that of the API key."""
    group: str | None = None
    """W&B group that the run belongs to."""
    job_type: str | None = None
    """W&B job type of the run, such as pretraining."""
    tags: list[Annotated[str, Field(min_length=1, max_length=64)]] = Field(default=[])
    """W&B tags of the run. A resumed run also keeps the tags that it has at the server."""
    notes: str | None = None
    """W&B notes on the run, in Markdown. A resumed run keeps the notes that it has at the server."""
    log_model: bool = False
    """Upload the exported model as an artifact when the run has finished; raise finish_timeout_s for a large model."""
    runs: Literal["one", "per_worker"] = "one"
    """one: a W&B run holds every worker's metrics; per_worker: each has its own, in one group."""
    init_timeout_s: PositiveFloat = 10.0
    """Seconds to wait for the server at the start."""
    finish_timeout_s: PositiveFloat = 10.0
    """Seconds to wait for uploads at the end, an artifact included."""


class AlertsSection(Section):
    """Warnings of a NaN, an idle GPU and nearly full memory; each comes again only after its cause was over."""

    enabled: bool = True
    """Warn at the terminal and in W&B."""
    utilization_percent: Percent = 50.0
    """GPU utilisation under which a warning comes, percent."""
    utilization_window_s: PositiveFloat = 120.0
    """Seconds that utilization must stay too low before it is an alert."""
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
