"""Settings of monitoring during training: W&B and samples."""

from typing import Annotated, Literal

from pydantic import Field

from esmeray.train_config.section import PositiveFloat, Section


class WandbSection(Section):
    """Weights & Biases. It can neither stop nor slow a run."""

    mode: Literal["offline", "online", "disabled"] = "offline"
    """offline: write a file for 'wandb sync'; online: send to the server (values it does not accept can be uploaded
    later from the run's folder); disabled: off."""
    project: str = "esmeray"
    """W&B project that the run belongs to."""
    entity: str | None = None
    """User or team that owns the W&B project. Default: owner of the API key."""
    group: str | None = None
    """W&B group of the run."""
    job_type: str | None = None
    """W&B job type of the run, e.g. pretraining."""
    tags: list[Annotated[str, Field(min_length=1, max_length=64)]] = Field(default=[])
    """W&B tags of the run. A resumed run also keeps its tags on the server."""
    notes: str | None = None
    """W&B notes on the run, in Markdown. A resumed run keeps its notes on the server."""
    log_model: bool = False
    """Upload the exported model as an artifact when the run has finished; raise finish_timeout_s for a large model."""
    runs: Literal["one", "per_worker"] = "one"
    """one: one W&B run with every worker's metrics; per_worker: a W&B run per worker, in one group."""
    init_timeout_s: PositiveFloat = 10.0
    """Seconds to wait for the server at the start."""
    finish_timeout_s: PositiveFloat = 10.0
    """Seconds to wait for uploads at the end, an artifact included."""


class MonitoringSection(Section):
    """Monitoring during training; samples are taken every training.gpu_log_interval seconds."""

    peak_tflops: PositiveFloat | None = None
    """Peak of one device in the training precision, TFLOP/s, for the model FLOPs utilisation. Default: the data sheet
    of known GPUs; for others the utilisation is left out."""
