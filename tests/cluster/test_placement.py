import os
import re
import socket
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import psutil
import pytest
from ray._common.utils import get_ray_address_file

from esmeray.cluster.placement import LOCAL, NodeResources, address_file, check_interface, find, place_workers
from esmeray.cluster.section import RaySection
from esmeray.common.errors import ResourceError


@pytest.mark.parametrize(
    ("asked", "nodes", "reason"),
    [
        (
            {"num_workers": 8},
            [(2, 0)],
            "8 workers with one CPU core each requested.*2 CPU cores and 0 GPUs on 1 machine: request at most 2",
        ),
        ({"num_workers": 3}, [(64, 2)], "3 workers with one GPU and CPU core each requested.*request at most 2"),
        (
            {"num_workers": (3, 4), "cpus_per_worker": 8},
            [(16, 0)],
            "at least 3 workers requested, but the cluster has 16",
        ),
        ({"num_workers": 2, "cpus_per_worker": 6}, [(4, 0), (4, 0)], "request at most 4"),
    ],
    ids=["workers", "workers with GPUs", "a range", "cores of one machine"],
)
def test_more_than_the_cluster_has_is_refused_with_what_it_has(asked, nodes, reason):
    with pytest.raises(ResourceError, match=reason):
        place_workers(RaySection(**asked), [NodeResources(*node) for node in nodes])


RANGE = RaySection(num_workers=(1, 8), allowed_workers=[1, 2, 4, 16])


@pytest.mark.parametrize(
    ("section", "nodes", "placed"),
    [
        # A worker per GPU; without GPUs two, or one on a single core.
        (RaySection(), [(1, 0)], (1, 1)),
        (RaySection(), [(64, 0)], (2, 32)),
        (RaySection(), [(3, 0), (3, 0), (3, 0)], (2, 3)),
        (RaySection(), [(64, 0), (8, 4), (8, 4)], (8, 2)),
        # The largest number of a range that fits.
        (RANGE, [(1, 0)], (1, 1)),
        (RANGE, [(16, 0), (16, 0)], (4, 8)),
        (RANGE, [(7, 0)], (4, 1)),
        (RANGE, [(16, 4), (2, 8)], (4, 4)),
        (RANGE, [(48, 3)], (2, 24)),
        (RaySection(num_workers=(1, 4), cpus_per_worker=8), [(16, 0)], (2, 8)),
    ],
    ids=str,
)
def test_as_many_workers_as_fit_are_placed(section, nodes, placed):
    nodes = [NodeResources(*node) for node in nodes]
    workers = place_workers(section, nodes)
    assert (workers.count, workers.cpus_each, workers.use_gpu) == (*placed, any(node.gpus for node in nodes))
    assert workers.largest(nodes) == workers.count and workers.largest([NodeResources(0, 0)]) == 0
    assert workers.largest(nodes * 8) == max(workers.allowed)


def test_the_address_of_a_started_cluster_is_found_where_ray_leaves_it(monkeypatch, tmp_path):
    for name in ("RAY_TMPDIR", "TMPDIR"):
        monkeypatch.delenv(name, raising=False)
    assert str(address_file()) == get_ray_address_file(None)
    for name in ("TMPDIR", "RAY_TMPDIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
        assert str(address_file()) == get_ray_address_file(None)


def test_without_a_started_cluster_one_is_started_here(monkeypatch, tmp_path, capsys):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    assert find(RaySection()) == LOCAL and not capsys.readouterr().err
    address_file().parent.mkdir()
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as other:
        Thread(target=other.serve_forever, daemon=True).start()
        for stale in ("127.0.0.1:1", f"127.0.0.1:{other.server_port}"):
            address_file().write_text(f"{stale}\n")
            assert find(RaySection()) == find(RaySection()) == LOCAL
            assert (
                capsys.readouterr().err.count(f"no cluster answers at {stale} any more, so a local cluster is used")
                == 1
            )
        other.shutdown()
    with pytest.raises(ResourceError, match=r"^ray\.address: auto, but no cluster runs on this machine"):
        find(RaySection(address="auto"))
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    with pytest.raises(ResourceError, match=r"^RAY_ADDRESS: auto, but no cluster runs on this machine"):
        find(RaySection())


def test_an_address_without_a_cluster_is_refused_with_its_source(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:2")
    assert find(RaySection(address=LOCAL)) == LOCAL
    for address in (None, "auto"):
        with pytest.raises(ResourceError, match=r"^RAY_ADDRESS: no Ray cluster answers at 127\.0\.0\.1:2; start it"):
            find(RaySection(address=address))
    for address in ("127.0.0.1:1", "ray://127.0.0.1:1", "no-such-host.invalid:6379", "http://127.0.0.1:1", "nonsense"):
        with pytest.raises(ResourceError, match=f"^ray.address: no Ray cluster answers at {re.escape(address)}; start"):
            find(RaySection(address=address))


@pytest.mark.skipif(os.getuid() != 0, reason="needs another user")
def test_what_another_user_says_is_this_machines_cluster_is_not_asked(monkeypatch, tmp_path, capsys):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    address_file().parent.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as trap:
        address_file().write_text(f"127.0.0.1:{trap.getsockname()[1]}")
        os.chown(address_file(), 65534, 65534)
        assert find(RaySection()) == LOCAL
        trap.setblocking(False)
        with pytest.raises(BlockingIOError):
            trap.accept()
    assert "belongs to another user, so" in capsys.readouterr().err


def test_an_unknown_interface_is_refused_with_the_machines_own(monkeypatch: pytest.MonkeyPatch):
    there = next(iter(psutil.net_if_addrs()))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", f"{there},")
    check_interface()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", f"{there},ib7")
    with pytest.raises(ResourceError, match=rf"^GLOO_SOCKET_IFNAME: {there},ib7: no such .*; available: .*\b{there}\b"):
        check_interface()
