"""Settings of a run's folder, and of the stores of objects that it may lie in."""

from typing import Annotated, Literal

from esmeray.common.remote import Storage, use
from esmeray.train_config.natures import FIXED, PATH, UNSEEN, with_absolute_paths
from esmeray.train_config.section import FolderName, NonNegativeInt, PositiveFloat, Section


class RunSection(Section):
    """Name of the run and place of its files."""

    name: FolderName = "esm2ae"
    """Name of the run and of its folder. The same name resumes the run."""
    storage_path: Annotated[str, UNSEEN, PATH] = "runs"
    """Folder that holds the runs; on a cluster, one that every node sees, or a URI such as s3://bucket/runs."""
    resume: Annotated[Literal["must", "allow", "never"], UNSEEN] = "allow"
    """must: resume or fail; allow: resume where there is a checkpoint; never: refuse a run that exists."""
    seed: Annotated[NonNegativeInt, FIXED] = 0
    """Seed of weights, shuffling, cropping and masking."""
    license: Annotated[str, UNSEEN] = "unknown"
    """License of the exported model, for its card, as the hub names it: mit, apache-2.0, cc-by-4.0 ..."""


class StorageSection(Section):
    """Stores of objects: sources, models, runs and results may be URIs (s3://, gs://, hf://, file://)."""

    cache_folder: Annotated[str | None, PATH] = None
    """Folder on each node's own disk for copies of sources, for weights of 8 bits, and for runs while they train.
    Default: esmeray/storage in XDG_CACHE_HOME or ~/.cache."""
    cache_gb: PositiveFloat = 100.0
    """Size of the copies; beyond it the least recently used are removed."""
    patience_s: PositiveFloat = 3600.0
    """Seconds that a store may be away during a run, or at its end."""

    def apply(self) -> None:
        """Follow these settings in this process and those that it starts."""
        use(Storage(**with_absolute_paths(self).model_dump()))
