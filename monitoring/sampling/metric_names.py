"""Names, units and meanings of the sampled metrics: the list that Prometheus, the dashboard and docs share.

``{gpu}`` is NVML's index on its machine, ``{worker}`` the rank.
"""

import re
from typing import NamedTuple


class Metric(NamedTuple):
    """One metric, of every GPU or worker that has it: a name, a unit, and a sentence without a full stop."""

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


PANELS: dict[str, dict[str, tuple[Metric, ...]]] = {
    "Training": {
        "Real tokens per second": (Metric("perf/tokens_per_s", "tokens/s", "Real tokens of all workers"),),
        "Loss": (Metric("train/loss", "number", "Training loss of the last logged step"),),
        "Model FLOPs utilisation": (
            Metric(
                "perf/mfu", "share", "Model FLOPs utilisation: of the devices' peak, what the model's operations make"
            ),
        ),
        "Step": (Metric("perf/step_s", "seconds", "Of an optimizer step"),),
        "Token budget left empty": (
            Metric("perf/padding_share", "share", "Of the token budget, what batches left empty"),
            Metric("worker/{worker}/padding_share", "share", "Of the token budget, what batches left empty"),
        ),
    },
    "Where a worker's step goes": {
        "Phases of a step": (
            Metric("worker/{worker}/data_wait_s", "seconds", "Of a step, waiting for batches"),
            Metric("worker/{worker}/forward_s", "seconds", "Of a step, forward pass"),
            Metric("worker/{worker}/backward_s", "seconds", "Of a step, backward pass"),
            Metric("worker/{worker}/optimizer_s", "seconds", "Of a step, update of the weights"),
            Metric("worker/{worker}/communication_s", "seconds", "Of a step, waiting for other workers"),
            Metric("worker/{worker}/checkpoint_s", "seconds", "Of a step, copying checkpoints"),
        ),
        "Step of each worker": (Metric("worker/{worker}/step_s", "seconds", "Of a step, whole"),),
        "Batches that are ready": (
            Metric("worker/{worker}/loader_queue_depth", "count", "Batches that are ready and wait for the worker"),
        ),
        "Features that were kept": (
            Metric(
                "worker/{worker}/feature_cache_hit_rate", "share", "Of features or structures asked for, those kept"
            ),
        ),
    },
    "GPUs": {
        "GPU utilisation": (Metric("gpu/{gpu}/util", "percent", "Time in which some kernel ran"),),
        "GPU memory in use": (
            Metric("gpu/{gpu}/mem_used_bytes", "bytes", "GPU memory in use, by all processes"),
            Metric("gpu/{gpu}/mem_total_bytes", "bytes", "GPU memory in all"),
        ),
        "GPU memory read or written": (
            Metric("gpu/{gpu}/mem_util", "percent", "Time in which GPU memory was read or written"),
        ),
        "Temperature": (Metric("gpu/{gpu}/temperature_c", "celsius", "Temperature of the chip"),),
        "Power": (
            Metric("gpu/{gpu}/power_w", "watts", "Power that the board draws"),
            Metric("gpu/{gpu}/power_limit_w", "watts", "Power that the board may draw"),
        ),
        "Clocks": (
            Metric("gpu/{gpu}/sm_clock_mhz", "MHz", "Clock of the SMs"),
            Metric("gpu/{gpu}/sm_clock_max_mhz", "MHz", "Highest clock of the SMs"),
            Metric("gpu/{gpu}/memory_clock_mhz", "MHz", "Clock of the memory"),
        ),
        "Throttle reasons (NVML's bits)": (
            Metric("gpu/{gpu}/throttle_reasons", "bits", "Why the clocks are lowered, as NVML's bits"),
        ),
        "PCIe": (
            Metric("gpu/{gpu}/pcie_tx_bytes_per_s", "bytes/s", "Sent over PCIe"),
            Metric("gpu/{gpu}/pcie_rx_bytes_per_s", "bytes/s", "Received over PCIe"),
        ),
        "NVLink": (
            Metric("gpu/{gpu}/nvlink_tx_bytes_per_s", "bytes/s", "Sent over all NVLinks"),
            Metric("gpu/{gpu}/nvlink_rx_bytes_per_s", "bytes/s", "Received over all NVLinks"),
        ),
        "Memory errors": (
            Metric("gpu/{gpu}/ecc_corrected", "count", "Memory errors corrected since the driver was loaded"),
            Metric("gpu/{gpu}/ecc_uncorrected", "count", "Memory errors not corrected since the driver was loaded"),
        ),
        "Processes": (Metric("gpu/{gpu}/processes", "count", "Processes that compute on the GPU"),),
    },
    "Memory of the workers": {
        "In tensors, reserved, peak": (
            Metric("worker/{worker}/torch_allocated_bytes", "bytes", "In tensors, on the worker's GPU"),
            Metric("worker/{worker}/torch_reserved_bytes", "bytes", "Held by torch's allocator, tensors included"),
            Metric("worker/{worker}/torch_peak_bytes", "bytes", "Most that was in tensors, in this epoch"),
        ),
        "Reserved without a tensor": (
            Metric("worker/{worker}/torch_fragmentation", "share", "Of the reserved memory, what no tensor has"),
        ),
        "Allocations tried again": (
            Metric(
                "worker/{worker}/torch_alloc_retries", "count", "Times that torch had to give memory back and try again"
            ),
        ),
        "Resident memory with loaders": (
            Metric("worker/{worker}/rss_bytes", "bytes", "Resident memory of the worker and its loader processes"),
            Metric("mem/host_rss_bytes", "bytes", "Resident memory of the sampling worker and its loader processes"),
        ),
    },
    "Machines": {
        "Memory": (
            Metric("mem/host_used_bytes", "bytes", "Memory that can not be had"),
            Metric("mem/host_available_bytes", "bytes", "Memory that can be had without swapping"),
            Metric("mem/host_total_bytes", "bytes", "Memory of the machine, or what its container may use"),
        ),
        "Cores": (Metric("cpu/percent", "percent", "Time in which the cores worked, all together"),),
        "CPU of the workers (100 is a core)": (
            Metric("worker/{worker}/cpu_percent", "percent", "CPU time of the worker and its loaders; 100 is one core"),
        ),
        "Disks": (
            Metric("disk/read_bytes_per_s", "bytes/s", "Read from all disks"),
            Metric("disk/write_bytes_per_s", "bytes/s", "Written to all disks"),
        ),
        "Network": (
            Metric("net/sent_bytes_per_s", "bytes/s", "Sent over all network interfaces"),
            Metric("net/received_bytes_per_s", "bytes/s", "Received over all network interfaces"),
        ),
    },
}
"""The metrics by the panels that show them, and these by the rows of the dashboard (:mod:`.grafana`)."""
METRICS = tuple(metric for panels in PANELS.values() for metrics in panels.values() for metric in metrics)
_INDEX = r"(?<=/)\d+(?=/)"
_BY_NAME = {re.sub(r"\{\w+\}", "{}", metric.name): metric for metric in METRICS}


def find(name: str) -> tuple[Metric, int | None] | None:
    """Return the metric of a full name and its GPU or worker; None for an unknown name."""
    metric, index = _BY_NAME.get(re.sub(_INDEX, "{}", name)), re.search(_INDEX, name)
    return None if metric is None else (metric, int(index[0]) if index else None)
