"""Check that a cluster has room for the service's replicas, at the start and at a reload."""

import pytest

from esmeray.common.errors import ResourceError
from esmeray.service import running
from esmeray.service.section import ServeSection


def served(*cpus: float, replicas: int = 1, index_cpus: float | None = None) -> ServeSection:
    models = [{"name": f"m{n}", "source": "a", "cpus": cores, "replicas": replicas} for n, cores in enumerate(cpus)]
    indexes = [] if index_cpus is None else [{"name": "i", "source": "b", "cpus": index_cpus}]
    return ServeSection.model_validate({"models": models, "indexes": indexes})


@pytest.fixture
def check(monkeypatch):
    def check(config: ServeSection, cores: float, before: ServeSection | None = None) -> str:
        """The refusal, or ''. ``cores``: the cluster's cores at the start, its free cores at a reload."""
        for name in ("cluster_resources", "available_resources"):
            monkeypatch.setattr(running.ray, name, lambda: {"CPU": cores} if cores else {})
        try:
            running.check_room(config, before)
        except ResourceError as error:
            return str(error)
        return ""

    return check


def test_two_models_and_an_index_start_on_two_cores_by_fractions(check):
    assert check(served(1, 1, index_cpus=1), 2) == (
        "models, indexes: their replicas need 3 CPU cores, 2 are free; start the service with lower cpus (0.5 is "
        "possible) or fewer replicas in its settings file"
    )
    assert check(served(0.5, 0.5, index_cpus=0.5), 2) == check(served(0.6, 0.7, index_cpus=0.7), 2) == ""


def test_a_reload_is_refused_if_the_successor_finds_no_core(check):
    two = served(1, 1)
    refusal = check(two, 0, two)
    assert "their successors, which start before the replicas end, need 1 CPU cores, 0 are free" in refusal
    assert "need 0.5 CPU cores, 0 are free" in check(served(0.5, 0.5), 0, two), "lower cpus alone free nothing yet"
    assert check(two, 1, two) == "", "one after the other"
    assert check(served(1, 1, replicas=2), 0, served(1, 1, replicas=2)) == "", "of two replicas one ends first"


def test_a_reload_counts_what_is_added_beside_successors(check):
    one = served(1)
    assert check(served(1, 1), 2, one) == "" and "need 2 CPU cores, 1 are free" in check(served(1, 1), 1, one)
    assert check(served(2), 2, one) == "" and "need 2 CPU cores" in check(served(2), 1, one)
    assert check(served(1), 1, served(1, 1)) == ""
