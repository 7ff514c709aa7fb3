import pytest

from train_config.errors import ResourceError
from train_config.schema import RaySection
from training.placement import NodeResources, place_workers


@pytest.mark.parametrize(
    ("nodes", "count", "cpus_each"),
    [
        ([(2, 0)], 2, 1),
        ([(1, 0)], 1, 1),
        ([(64, 0)], 2, 32),
        ([(16, 4)], 4, 4),
        ([(3, 0), (3, 0), (3, 0)], 2, 3),
        ([(64, 0), (8, 4), (8, 4)], 8, 2),
    ],
    ids=str,
)
def test_auto_is_a_worker_a_gpu_and_two_without(nodes, count, cpus_each):
    nodes = [NodeResources(*node) for node in nodes]
    workers = place_workers(RaySection(), nodes)
    assert (workers.count, workers.cpus_each) == (count, cpus_each)
    assert workers.use_gpu == any(node.gpus for node in nodes)


def test_more_workers_than_the_cluster_has_are_refused_with_what_it_has():
    with pytest.raises(ResourceError, match=r"8 workers asked.*2 CPU cores and 0 GPUs on 1 machine: ask for at most 2"):
        place_workers(RaySection(num_workers=8), [NodeResources(2, 0)])
    with pytest.raises(ResourceError, match=r"3 workers asked, one GPU and CPU core each.*ask for at most 2"):
        place_workers(RaySection(num_workers=3), [NodeResources(64, 2)])


def test_more_cores_than_one_machine_has_are_refused():
    with pytest.raises(ResourceError, match="ask for at most 4"):
        place_workers(RaySection(num_workers=2, cpus_per_worker=6), [NodeResources(4, 0), NodeResources(4, 0)])
