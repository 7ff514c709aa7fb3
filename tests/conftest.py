"""Fixtures shared by tests of several packages.

Ray, DeepSpeed and modules that need them are imported inside the fixtures: tests marked cuda run without both.
"""

from __future__ import annotations

import gc
import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import hypothesis
import pytest
import torch
import torch.distributed as dist

from esmeray.dataset.store.conversion import ensure_store
from tests.clusters import REPOSITORY, TOKEN, StartedCluster, started_cluster

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from esmeray.dataset.batches.loader_process import LoaderProcess
    from tests.artifacts import Artifacts
    from tests.service.serving import Serving
    from tests.slurm import SlurmJob
    from tests.worker_group import WorkerGroup

# One thread here and in processes that tests start: the rounding of sums depends on the number of threads.
os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)
# At Ray's default niceness of 15, other tests leave its workers a thirtieth of a core, and they time out.
os.environ.setdefault("RAY_worker_niceness", "0")
# Clusters that tests start use their own token: the user's token file is neither read nor changed.
os.environ["RAY_AUTH_TOKEN"] = TOKEN


# An example may take seconds on a busy machine.
hypothesis.settings.register_profile("no deadline", deadline=None)
hypothesis.settings.load_profile("no deadline")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Undo a number of threads that a test sets, e.g. by a program that it runs in this process."""
    yield
    torch.set_num_threads(1)


RAY_FILES: set[Path] = set()
"""Files with a test on a Ray cluster."""
RAY = ExitStack()
"""Closes the clusters of this test process."""


SHARED = ("worker_group", "ray_address", "slurm_job")
"""Fixtures that take tens of seconds to start: all files that name one run in the same test process."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Distribute tests by file, and keep files with the same shared fixture together.

    ``--dist loadgroup`` groups nothing: pytest-xdist 3.8.0 writes the group into ``_nodeid``, which pytest 9.2 ignores.
    """
    from xdist.scheduler import LoadFileScheduling

    @cache
    def scope(file: str) -> str:
        text = (config.rootpath / file).read_text(encoding="utf-8")
        return next((name for name in SHARED if name in text), file)

    class ByFixture(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope(super()._split_scope(nodeid))

    return ByFixture(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the files: Ray clusters first, then slow tests, so that short files fill both test processes at the end.

    Tests marked cuda are skipped without a CUDA device.
    """
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("cuda"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    for item in items:
        if {"ray_cluster", "slurm_job"} & {*getattr(item, "fixturenames", ())}:
            RAY_FILES.add(item.path)
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: (item.path not in RAY_FILES, item.path not in slow))


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Close this process's cluster after its last file: an idle cluster uses a twentieth of a core."""
    if nextitem is not None and item.path in RAY_FILES and nextitem.path not in RAY_FILES:
        RAY.close()


@pytest.fixture(scope="module", autouse=True)
def short_collections() -> None:
    """Exclude existing objects from garbage collection during a file's tests: walking them takes half a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def heard_interrupts() -> None:
    """Restore SIGINT: a shell's background programs, and the processes that tests start from them, ignore it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder of real data next to the repository."""
    folder = REPOSITORY.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"the real data of development is not at {folder}")
    return folder


@pytest.fixture
def full_disk() -> Callable[[int], AbstractContextManager[None]]:
    """Context manager that simulates a full disk: ``with full_disk(n):`` no file can grow beyond n bytes."""

    @contextmanager
    def limited(size_bytes: int) -> Iterator[None]:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    return limited


@pytest.fixture
def saved_figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Figures that a test saves, so that it can check the artists instead of pixels."""
    from matplotlib.figure import Figure

    figures: list[Figure] = []
    savefig = Figure.savefig

    def kept(figure: Figure, *arguments: Any, **options: Any) -> None:
        figures.append(figure)
        savefig(figure, *arguments, **options)

    monkeypatch.setattr(Figure, "savefig", kept)
    return figures


@pytest.fixture(scope="session")
def process_group() -> Iterator[None]:
    """A gloo group of this process alone, one per session: DeepSpeed keeps the groups that it created."""
    torch.set_num_threads(1)
    if not dist.is_initialized():  # training in this process may have left its group
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def loader_processes(monkeypatch: pytest.MonkeyPatch) -> list[LoaderProcess]:
    """Loader processes that a test starts."""
    from esmeray.dataset.batches import loader

    started: list[LoaderProcess] = []

    class Noted(loader.LoaderProcess):
        def __init__(self, prepare: Callable[..., Any]) -> None:
            super().__init__(prepare)
            started.append(self)

    monkeypatch.setattr(loader, "LoaderProcess", Noted)
    return started


@pytest.fixture(scope="session")
def worker_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerGroup]:
    """Processes of a gloo group, for tests with several ranks."""
    from tests.worker_group import WorkerGroup

    group = WorkerGroup(tmp_path_factory.mktemp("worker-group"))
    yield group
    group.close()


@pytest.fixture(scope="session")
def store_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Path of the tiny sample's store."""
    from tests.runs import tiny_config

    root = tmp_path_factory.mktemp("stores")
    return str(ensure_store(tiny_config(root).data, root))


@pytest.fixture(scope="session")
def artifacts(process_group: None, tmp_path_factory: pytest.TempPathFactory) -> Artifacts:
    """Small models and runs. Tests read them and never change them."""
    from tests.artifacts import Artifacts

    return Artifacts(tmp_path_factory.mktemp("artifacts"))


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[StartedCluster]:
    """One local Ray cluster per test process; runs connect to it like to a cluster that a user started."""
    from esmeray.cluster.connection import connected
    from esmeray.cluster.section import RaySection

    cluster = RAY.enter_context(started_cluster(4))
    RAY.enter_context(connected(RaySection(address=cluster.address)))
    os.environ.pop("RAY_AUTH_MODE")  # programs that tests start find the cluster's mode themselves
    yield cluster
    RAY.close()


@pytest.fixture(scope="session")
def ray_address(ray_cluster: StartedCluster) -> str:
    return ray_cluster.address


@pytest.fixture(scope="session")
def open_cluster(ray_cluster: StartedCluster) -> StartedCluster:
    """A second cluster, without a token, whose node has two simulated GPUs."""
    return RAY.enter_context(started_cluster(2, gpus=2, mode="disabled"))


@pytest.fixture(scope="session")
def slurm_job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmJob]:
    """A Ray cluster of two nodes, started by a Slurm job."""
    from tests.slurm import started_job

    yield RAY.enter_context(started_job(tmp_path_factory.mktemp("slurm")))
    RAY.close()


@pytest.fixture(scope="session")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """The service's small models in this process, and servers for them."""
    from tests.service.serving import Serving

    serving = Serving(tmp_path_factory.mktemp("served"))
    yield serving
    serving.close()


@pytest.fixture(scope="module")
def address(serving: Serving) -> Iterator[str]:
    """Address of a server with all of its models."""
    with serving.address(serving.app()) as address:
        yield address


@pytest.fixture(scope="module")
def client(address: str) -> Iterator[httpx.Client]:
    """HTTP client of the server at ``address``."""
    with httpx.Client(base_url=address, timeout=60) as client:
        yield client
