"""Settings of the Ray cluster and its workers."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from esmeray.train_config.section import NonNegativeFloat, NonNegativeInt, OneOrMore, PositiveInt, Section


class RaySection(Section):
    """The cluster."""

    address: str | None = None
    """Ray cluster, as HOST:PORT, ray://HOST:PORT or 'auto'; 'local' always starts one here. Default: the cluster at
    hand (RAY_ADDRESS or a running one), else a local one."""
    num_workers: Annotated[tuple[PositiveInt, PositiveInt] | PositiveInt | Literal["auto"], OneOrMore] = "auto"
    """Training workers, one a device. auto: one for each GPU; without GPUs two, or one on a single core. Two numbers,
    the least and the most: as many as the cluster holds, more or fewer whenever machines come or go."""
    allowed_workers: list[PositiveInt] | None = None
    """Numbers between the least and the most that are used. Default: each."""
    minimum_stay_s: NonNegativeFloat = 300.0
    """Seconds that more workers must have been possible, without a break, before they are used: each change is a start
    from a checkpoint."""
    cpus_per_worker: PositiveInt | Literal["auto"] = "auto"
    """CPU cores that each worker reserves and computes with. auto: an equal part of the cluster's, for the most workers
    that it holds at the start."""
    max_failures: NonNegativeInt = 3
    """Times in a row, without a new checkpoint between them, that workers lost to a fault of a machine are replaced."""
    dashboard_port: Annotated[int, Field(gt=0, le=65535)] | None = None
    """Port of Ray's dashboard on 127.0.0.1, for a local cluster. Default: 8265, or the next that is free."""

    @model_validator(mode="after")
    def _some_number_of_workers(self) -> "RaySection":
        if isinstance(self.num_workers, tuple) and not self.sizes:
            least, most = self.num_workers
            raise ValueError(f"num_workers: allowed_workers has no number from {least} to {most}")
        return self

    @property
    def sizes(self) -> tuple[int, ...]:
        """The numbers of workers that take turns, ascending; none where the number is fixed."""
        if not isinstance(self.num_workers, tuple):
            return ()
        least, most = self.num_workers
        return tuple(
            size for size in range(least, most + 1) if self.allowed_workers is None or size in self.allowed_workers
        )
