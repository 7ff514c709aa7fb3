"""Settings of the Ray cluster and its workers."""

from typing import Annotated, Literal

from pydantic import model_validator

from esmeray.train_config.section import NonNegativeFloat, NonNegativeInt, OneOrMore, PositiveInt, Section


class RaySection(Section):
    """Ray cluster and its workers."""

    address: str | None = None
    """Ray cluster as HOST:PORT, ray://HOST:PORT or 'auto'; 'local' always starts one here. Default: RAY_ADDRESS, or a
    cluster that runs on this machine, otherwise a local one is started."""
    num_workers: Annotated[tuple[PositiveInt, PositiveInt] | PositiveInt | Literal["auto"], OneOrMore] = "auto"
    """Number of training workers, one per device. auto: one per GPU; without GPUs two, or one on a single core. Two
    numbers are minimum and maximum: as many as the cluster has room for, adapted as machines come and go."""
    allowed_workers: list[PositiveInt] | None = None
    """Allowed numbers of workers between minimum and maximum. Default: all."""
    minimum_stay_s: NonNegativeFloat = 300.0
    """Seconds for which room for more workers must be available without a break before they are used. Each change
    restarts training from a checkpoint."""
    cpus_per_worker: PositiveInt | Literal["auto"] = "auto"
    """CPU cores that each worker reserves and computes with. auto: an equal share of the cluster's cores, for the
    maximum number of workers that it has room for at the start."""
    max_failures: NonNegativeInt = 3
    """Maximum number of consecutive losses of workers to machine faults, without a new checkpoint in between, after
    which the workers are replaced."""

    @model_validator(mode="after")
    def _some_number_of_workers(self) -> "RaySection":
        if isinstance(self.num_workers, tuple) and not self.sizes:
            least, most = self.num_workers
            raise ValueError(f"num_workers: allowed_workers contains no number from {least} to {most}")
        return self

    @property
    def sizes(self) -> tuple[int, ...]:
        """Allowed numbers of workers, ascending; empty if the number is fixed."""
        if not isinstance(self.num_workers, tuple):
            return ()
        least, most = self.num_workers
        return tuple(
            size for size in range(least, most + 1) if self.allowed_workers is None or size in self.allowed_workers
        )
