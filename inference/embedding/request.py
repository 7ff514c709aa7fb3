"""An embedding job as it is asked for. Nothing here needs torch."""

import re
from dataclasses import dataclass
from pathlib import Path

from inference.embedding.settings import check_registered
from train_config.embed_schema import EmbedSection
from train_config.schema import IngestSection, RaySection


@dataclass(frozen=True)
class JobRequest:
    """A job as it is asked for.

    Attributes:
        models: folders or names.
        sources: FASTA files, folders, globs, or one store.
        output: folder to make.
        cache, cache_bytes: folder of known values, and its size; None for none.
        device: cpu or cuda; None takes GPUs where there are any.
        cluster: how to reach Ray; None computes in this process.
        workers, cpus_per_worker, gpus_per_worker: of a cluster; None for one a device.
        stage_dir: of each node.
    """

    models: list[str]
    sources: list[str]
    output: Path
    settings: EmbedSection
    ingest: IngestSection
    device: str | None = None
    random_weights: bool = False
    overwrite: bool = False
    cache: Path | None = None
    cache_bytes: int = 0
    cluster: RaySection | None = None
    workers: int | None = None
    cpus_per_worker: int = 1
    gpus_per_worker: float = 1.0
    stage_dir: Path | None = None

    def __post_init__(self) -> None:
        check_registered(self.settings)

    @property
    def partial(self) -> Path:
        """Folder of what is not complete."""
        return self.output.with_name(f"{self.output.name}.partial")

    def folder_name(self, model: str) -> str:
        """Name of a model's folder where there are several."""
        return re.sub(r"[^\w.+-]+", "_", Path(model).name or model)
