"""Names, units and meanings of the sampled metrics, shared by Prometheus, Grafana, W&B and the docs.

A name begins with its section (train, throughput, gpu, host or data); W&B groups charts by it. ``{gpu}`` is NVML's
index on its machine, ``{worker}`` the rank.
"""

import re
from typing import NamedTuple


class Metric(NamedTuple):
    """A metric, possibly one per GPU or worker: name, unit, and a description without a full stop."""

    name: str
    unit: str
    description: str

    @property
    def last_part(self) -> str:
        return self.name.rpartition("/")[2]

    @property
    def prometheus_name(self) -> str:
        """Name given to Ray, which prefixes ``ray_``."""
        return "esmeray_" + "_".join(piece for piece in self.name.split("/") if not piece.startswith("{"))


METRICS = (
    Metric("train/loss", "number", "Training loss of the last logged step"),
    Metric("throughput/tokens_per_s", "tokens/s", "Real tokens of all workers"),
    Metric(
        "throughput/mfu", "share", "Model FLOPs utilisation: operations of the model, as a share of the devices' peak"
    ),
    Metric("throughput/step_s", "seconds", "Duration of an optimizer step"),
    Metric("data/worker/{worker}/data_wait_s", "seconds", "Part of a step: waiting for batches"),
    Metric("throughput/worker/{worker}/forward_s", "seconds", "Part of a step: forward pass"),
    Metric("throughput/worker/{worker}/backward_s", "seconds", "Part of a step: backward pass"),
    Metric("throughput/worker/{worker}/optimizer_s", "seconds", "Part of a step: update of the weights"),
    Metric("throughput/worker/{worker}/communication_s", "seconds", "Part of a step: waiting for other workers"),
    Metric("throughput/worker/{worker}/checkpoint_s", "seconds", "Part of a step: copying checkpoints"),
    Metric("throughput/worker/{worker}/step_s", "seconds", "Duration of a worker's step"),
    Metric("gpu/{gpu}/util", "percent", "Share of time in which a kernel ran"),
    Metric("gpu/{gpu}/mem_used_bytes", "bytes", "GPU memory in use, by all processes"),
    Metric("gpu/{gpu}/mem_total_bytes", "bytes", "Total GPU memory"),
    Metric("gpu/{gpu}/mem_util", "percent", "Share of time in which GPU memory was read or written"),
    Metric("gpu/{gpu}/temperature_c", "celsius", "Temperature of the chip"),
    Metric("gpu/{gpu}/power_w", "watts", "Power draw of the board"),
    Metric("gpu/{gpu}/power_limit_w", "watts", "Power limit of the board"),
    Metric("gpu/{gpu}/sm_clock_mhz", "MHz", "Clock of the SMs"),
    Metric("gpu/{gpu}/sm_clock_max_mhz", "MHz", "Highest clock of the SMs"),
    Metric("gpu/{gpu}/memory_clock_mhz", "MHz", "Clock of the memory"),
    Metric("gpu/{gpu}/throttle_reasons", "bits", "Reasons for lowered clocks, as NVML's bits"),
    Metric("gpu/{gpu}/pcie_tx_bytes_per_s", "bytes/s", "Sent over PCIe"),
    Metric("gpu/{gpu}/pcie_rx_bytes_per_s", "bytes/s", "Received over PCIe"),
    Metric("gpu/{gpu}/nvlink_tx_bytes_per_s", "bytes/s", "Sent over all NVLinks"),
    Metric("gpu/{gpu}/nvlink_rx_bytes_per_s", "bytes/s", "Received over all NVLinks"),
    Metric("gpu/{gpu}/ecc_corrected", "count", "Memory errors corrected since the driver was loaded"),
    Metric("gpu/{gpu}/ecc_uncorrected", "count", "Memory errors not corrected since the driver was loaded"),
    Metric("gpu/{gpu}/processes", "count", "Processes that compute on the GPU"),
    Metric("gpu/worker/{worker}/torch_allocated_bytes", "bytes", "In tensors, on the worker's GPU"),
    Metric("gpu/worker/{worker}/torch_reserved_bytes", "bytes", "Reserved by torch's allocator, including tensors"),
    Metric("gpu/worker/{worker}/torch_peak_bytes", "bytes", "Maximum in tensors, in this epoch"),
    Metric("gpu/worker/{worker}/torch_fragmentation", "share", "Share of the reserved memory that holds no tensor"),
    Metric(
        "gpu/worker/{worker}/torch_alloc_retries",
        "count",
        "Number of times that torch released cached memory and retried an allocation",
    ),
    Metric("host/mem_used_bytes", "bytes", "Memory in use (not available)"),
    Metric("host/mem_available_bytes", "bytes", "Memory that is available without swapping"),
    Metric("host/mem_total_bytes", "bytes", "Memory of the machine, or the limit of its container"),
    Metric("host/worker/{worker}/rss_bytes", "bytes", "Resident memory of the worker and its loader processes"),
    Metric("host/cpu_percent", "percent", "CPU utilisation over all cores"),
    Metric("host/worker/{worker}/cpu_percent", "percent", "CPU time of the worker and its loaders; 100 is one core"),
    Metric("host/disk_read_bytes_per_s", "bytes/s", "Read from all disks"),
    Metric("host/disk_write_bytes_per_s", "bytes/s", "Written to all disks"),
    Metric("host/net_sent_bytes_per_s", "bytes/s", "Sent over all network interfaces"),
    Metric("host/net_received_bytes_per_s", "bytes/s", "Received over all network interfaces"),
    Metric("data/padding_share", "share", "Unused share of the token budget"),
    Metric("data/worker/{worker}/padding_share", "share", "Unused share of the token budget"),
    Metric("data/worker/{worker}/loader_queue_depth", "count", "Prefetched batches that wait for the worker"),
    Metric(
        "data/worker/{worker}/feature_cache_hit_rate", "share", "Share of features or structures found in the cache"
    ),
)
"""All metrics, in the order of docs/monitoring.md; docker/grafana/esmeray.json shows them."""
RUN_METRICS = {
    "tokens_per_s": "throughput/tokens_per_s",
    "step_s": "throughput/step_s",
    "padding_share": "data/padding_share",
    "loss": "train/loss",
}
"""Metrics of the whole run, by their names in the training loop."""
WORKER_METRICS = {metric.last_part: metric.name for metric in METRICS if "{worker}" in metric.name}
"""Metrics of each worker, by their names in the training loop."""
_INDEX = r"(?<=/)\d+(?=/)"
_BY_NAME = {re.sub(r"\{\w+\}", "{}", metric.name): metric for metric in METRICS}


def find(name: str) -> tuple[Metric, int | None] | None:
    """Return the metric of a full name and its GPU or worker; None for an unknown name."""
    metric = _BY_NAME.get(re.sub(_INDEX, "{}", name))
    index = re.search(_INDEX, name)
    return None if metric is None else (metric, int(index[0]) if index else None)
