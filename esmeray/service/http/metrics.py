"""Prometheus metrics of an ingress process, and of the replicas, which send theirs with each reply."""

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

# Bucket bounds of the histogram: from a cache hit to the default of limits.timeout_s.
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)

_OF_REPLICAS = {
    "queued_tokens": "Waiting tokens",
    "memory_bytes": "Memory in use: of the device, or resident on a CPU",
    "tokens": "Tokens computed",
    "batches": "Batches computed",
    "computing_s": "Seconds in which batches were computed",
    "budgets": "Tokens that the computed batches had room for; tokens over these is the fill of the batches",
    "hits": "Sequences found in the cache",
    "misses": "Sequences not found in the cache",
}


class Metrics:
    """Metrics of an ingress process; see the module."""

    def __init__(self) -> None:
        # A registry of its own: in the library's global one, tests and rebuilt applications would register names twice.
        self._registry = registry = CollectorRegistry()
        self.requests = Counter("esmeray_requests", "Requests answered", ["endpoint", "status"], registry=registry)
        self.seconds = Histogram(
            "esmeray_request_seconds",
            "Seconds to the end of the answer",
            ["endpoint"],
            registry=registry,
            buckets=SECONDS,
        )
        self.ongoing = Gauge("esmeray_requests_ongoing", "Requests being answered", registry=registry)
        self.sequences = Counter("esmeray_sequences", "Sequences requested", ["model"], registry=registry)
        self.residues = Counter("esmeray_residues", "Residues requested", ["model"], registry=registry)
        self.replicas_lost = Counter("esmeray_replicas_lost", "Calls whose replica was lost", registry=registry)
        self._of_replicas = {
            name: Gauge(f"esmeray_replica_{name}", text, ["model", "replica"], registry=registry)
            for name, text in _OF_REPLICAS.items()
        }

    def of_replica(self, model: str, statistics: Mapping[str, float | str]) -> None:
        # Gauges even for totals: the replica counts, and its totals arrive as they are.
        for name in self._of_replicas.keys() & statistics.keys():
            self._of_replicas[name].labels(model, statistics["replica"]).set(float(statistics[name]))

    def page(self) -> bytes:
        return generate_latest(self._registry)
