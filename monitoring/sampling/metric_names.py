"""Names, units and meanings of the sampled metrics: the list that Prometheus, dashboards and docs share.

``{gpu}`` is NVML's index on its machine, ``{worker}`` the rank.
"""

import re
from dataclasses import dataclass
from typing import Literal

Unit = Literal[
    "percent", "bytes", "bytes/s", "seconds", "tokens/s", "celsius", "watts", "MHz", "share", "count", "bits", "number"
]


@dataclass(frozen=True)
class Metric:
    """One metric, of every GPU or worker that has it.

    Attributes:
        name: with ``{gpu}`` or ``{worker}`` where there is one for each.
        unit: of its values.
        description: one sentence without a full stop.
    """

    name: str
    unit: Unit
    description: str

    @property
    def per(self) -> Literal["gpu", "worker", "host", "run"]:
        if "{gpu}" in self.name:
            return "gpu"
        if "{worker}" in self.name:
            return "worker"
        return "run" if self.name.startswith(("perf/", "train/")) else "host"

    @property
    def prometheus_name(self) -> str:
        """Name given to Ray, which prefixes ``ray_``."""
        parts = [piece for piece in self.name.split("/") if not piece.startswith("{")]
        return "esmeray_" + "_".join(parts)

    def of(self, index: int) -> str:
        """The full name of this GPU's or worker's metric."""
        return self.name.format(gpu=index, worker=index)


GPU_METRICS = (
    Metric("gpu/{gpu}/util", "percent", "Time in which some kernel ran"),
    Metric("gpu/{gpu}/mem_util", "percent", "Time in which GPU memory was read or written"),
    Metric("gpu/{gpu}/mem_used_bytes", "bytes", "GPU memory in use, by all processes"),
    Metric("gpu/{gpu}/mem_total_bytes", "bytes", "GPU memory in all"),
    Metric("gpu/{gpu}/temperature_c", "celsius", "Temperature of the chip"),
    Metric("gpu/{gpu}/power_w", "watts", "Power that the board draws"),
    Metric("gpu/{gpu}/power_limit_w", "watts", "Power that the board may draw"),
    Metric("gpu/{gpu}/sm_clock_mhz", "MHz", "Clock of the SMs"),
    Metric("gpu/{gpu}/sm_clock_max_mhz", "MHz", "Highest clock of the SMs"),
    Metric("gpu/{gpu}/memory_clock_mhz", "MHz", "Clock of the memory"),
    Metric("gpu/{gpu}/throttle_reasons", "bits", "Why the clocks are lowered, as NVML's bits"),
    Metric("gpu/{gpu}/pcie_tx_bytes_per_s", "bytes/s", "Sent over PCIe"),
    Metric("gpu/{gpu}/pcie_rx_bytes_per_s", "bytes/s", "Received over PCIe"),
    Metric("gpu/{gpu}/nvlink_tx_bytes_per_s", "bytes/s", "Sent over all NVLinks"),
    Metric("gpu/{gpu}/nvlink_rx_bytes_per_s", "bytes/s", "Received over all NVLinks"),
    Metric("gpu/{gpu}/ecc_corrected", "count", "Memory errors corrected since the driver was loaded"),
    Metric("gpu/{gpu}/ecc_uncorrected", "count", "Memory errors not corrected since the driver was loaded"),
    Metric("gpu/{gpu}/processes", "count", "Processes that compute on the GPU"),
)
HOST_METRICS = (
    Metric("mem/host_total_bytes", "bytes", "Memory of the machine, or what its container may use"),
    Metric("mem/host_available_bytes", "bytes", "Memory that can be had without swapping"),
    Metric("mem/host_used_bytes", "bytes", "Memory that can not be had"),
    Metric("mem/host_rss_bytes", "bytes", "Resident memory of the sampling worker and its loader processes"),
    Metric("cpu/percent", "percent", "Time in which the cores worked, all together"),
    Metric("disk/read_bytes_per_s", "bytes/s", "Read from all disks"),
    Metric("disk/write_bytes_per_s", "bytes/s", "Written to all disks"),
    Metric("net/sent_bytes_per_s", "bytes/s", "Sent over all network interfaces"),
    Metric("net/received_bytes_per_s", "bytes/s", "Received over all network interfaces"),
)
PROCESS_METRICS = (
    Metric("worker/{worker}/rss_bytes", "bytes", "Resident memory of the worker and its loader processes"),
    Metric("worker/{worker}/cpu_percent", "percent", "CPU time of the worker and its loaders; 100 is one core"),
)
TORCH_METRICS = (
    Metric("worker/{worker}/torch_allocated_bytes", "bytes", "In tensors, on the worker's GPU"),
    Metric("worker/{worker}/torch_reserved_bytes", "bytes", "Held by torch's allocator, tensors included"),
    Metric("worker/{worker}/torch_peak_bytes", "bytes", "Most that was in tensors, in this epoch"),
    Metric("worker/{worker}/torch_alloc_retries", "count", "Times that torch had to give memory back and try again"),
    Metric("worker/{worker}/torch_fragmentation", "share", "Of the reserved memory, what no tensor has"),
)
LOOP_METRICS = (
    Metric("worker/{worker}/step_s", "seconds", "Of a step, whole"),
    Metric("worker/{worker}/data_wait_s", "seconds", "Of a step, waiting for batches"),
    Metric("worker/{worker}/forward_s", "seconds", "Of a step, forward pass"),
    Metric("worker/{worker}/backward_s", "seconds", "Of a step, backward pass"),
    Metric("worker/{worker}/optimizer_s", "seconds", "Of a step, update of the weights"),
    Metric("worker/{worker}/communication_s", "seconds", "Of a step, waiting for other workers"),
    Metric("worker/{worker}/checkpoint_s", "seconds", "Of a step, copying checkpoints"),
    Metric("worker/{worker}/padding_share", "share", "Of the token budget, what batches left empty"),
    Metric("worker/{worker}/loader_queue_depth", "count", "Batches that are ready and wait for the worker"),
    Metric("worker/{worker}/feature_cache_hit_rate", "share", "Of features or structures asked for, those kept"),
)
RUN_METRICS = (
    Metric("perf/tokens_per_s", "tokens/s", "Real tokens of all workers"),
    Metric("perf/step_s", "seconds", "Of an optimizer step"),
    Metric("perf/padding_share", "share", "Of the token budget, what batches left empty"),
    Metric("perf/mfu", "share", "Model FLOPs utilisation: of the devices' peak, what the model's operations make"),
    Metric("train/loss", "number", "Training loss of the last logged step"),
)
METRICS = GPU_METRICS + HOST_METRICS + PROCESS_METRICS + TORCH_METRICS + LOOP_METRICS + RUN_METRICS
"""All metrics."""


def last_part(metric: Metric) -> str:
    """Return the name in its group: ``forward_s``."""
    return metric.name.rpartition("/")[2]


def find(name: str) -> tuple[Metric, int | None] | None:
    """Return the metric of a full name and its GPU or worker; None for an unknown name."""
    index = re.search(r"(?<=/)\d+(?=/)", name)
    metric = _BY_NAME.get(name if index is None else f"{name[: index.start()]}{{}}{name[index.end() :]}")
    return None if metric is None else (metric, None if index is None else int(index[0]))


_BY_NAME = {re.sub(r"\{\w+\}", "{}", metric.name): metric for metric in METRICS}
