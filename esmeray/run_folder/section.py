"""Settings of a run's folder and of object storage."""

from typing import Annotated, Literal

from esmeray.common.remote import Storage, use
from esmeray.train_config.section import (
    FIXED,
    PATH,
    UNSEEN,
    FolderName,
    NonNegativeInt,
    PositiveFloat,
    Section,
    with_absolute_paths,
)


class RunSection(Section):
    """Name of the run and location of its files."""

    name: FolderName = "esm2ae"
    """Name of the run and of its folder. The same name resumes the run."""
    storage_path: Annotated[str, UNSEEN, PATH] = "runs"
    """Folder that contains the runs; on a cluster a folder that every node sees, or a URI such as s3://bucket/runs."""
    resume: Annotated[Literal["must", "allow", "never"], UNSEEN] = "allow"
    """must: resume or fail; allow: resume if there is a checkpoint; never: refuse a run that exists."""
    seed: Annotated[NonNegativeInt, FIXED] = 0
    """Seed of weights, shuffling, cropping and masking."""
    license: Annotated[str, UNSEEN] = "unknown"
    """License of the exported model for its card, as named on the hub: mit, apache-2.0, cc-by-4.0 ..."""


class StorageSection(Section):
    """Object storage: sources, models, runs and results may be URIs (s3://, gs://, hf://, file://)."""

    cache_folder: Annotated[str | None, PATH] = None
    """Folder on each node's own disk for copies of sources, for 8-bit weights, and for runs during training. Default:
    esmeray/storage in XDG_CACHE_HOME or ~/.cache."""
    cache_gb: PositiveFloat = 100.0
    """Maximum size of the copies, in GB; beyond it the least recently used are removed."""
    patience_s: PositiveFloat = 3600.0
    """Seconds that a store may be unreachable during a run or at its end."""

    def apply(self) -> None:
        """Apply these settings to this process and to the processes that it starts."""
        use(Storage(**with_absolute_paths(self).model_dump()))
