"""Sources, runs and embeddings in an S3 store that answers 500, 503 or half an object, or is unreachable."""

import gzip
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from esmeray.cluster.collective import WorkerContext
from esmeray.common import command_line, remote
from esmeray.common.errors import ConfigError, DataError, EsmerayError, ResourceError
from esmeray.common.publishing import MADE_FILE, made_file, made_folder
from esmeray.common.remote import Storage, listing, local_path, remove, upload, use, write
from esmeray.dataset.embeddings.reader import read_embeddings
from esmeray.inference.embedding.job import run_job
from esmeray.inference.embedding.shard_files import ShardFiles
from esmeray.inference.index.search import open_index
from esmeray.run_folder.metrics_log import read_metrics
from esmeray.run_folder.mirror import RunMirror
from esmeray.run_folder.paths import Outcome, RunFolder
from esmeray.tasks.plan import TaskPlan
from esmeray.tools import __main__ as esmeray
from esmeray.training.config import Config
from esmeray.training.launch.driver import train
from esmeray.training.loop.worker import train_worker
from tests.inference.embedding.jobs import final_bytes, replace, request
from tests.model.support import random_sequences
from tests.object_store import ObjectStore, object_store, use_storage
from tests.runs import events, exported_weights, run_folder, tiny_config, train_losses
from tests.training.runs import assert_same_run
from tests.worker_group import WorkerGroup, process_of

pytestmark = pytest.mark.slow

FASTA = "s3://bucket/data/proteins.fasta.gz"
RUN = "s3://bucket/runs/tiny"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    with object_store() as server:
        file = tmp_path_factory.mktemp("data") / "proteins.fasta.gz"
        sequences = random_sequences([30 + number % 30 for number in range(120)])
        records = (f">p{number}\n{sequence}\n" for number, sequence in enumerate(sequences))
        file.write_bytes(gzip.compress("".join(records).encode()))
        upload(file, FASTA)
        yield server


@pytest.fixture
def store(server: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    use_storage(monkeypatch)
    use_node("cache", tmp_path)
    server.fault = lambda method, path: None
    server.requests.clear()
    return server


def use_node(name: str, tmp_path: Path, **settings: Any) -> None:
    """Act as a node with this name and its own disk."""
    use(Storage(**{"cache_folder": str(tmp_path / name), "cache_gb": 1.0, "patience_s": 60.0} | settings))


def failing(*faults: int | str, on: str) -> Callable[[str, str], int | str | None]:
    """Return a fault function: reads of paths that contain ``on`` fail with one fault after the other."""
    left = [*faults]
    return lambda method, path: left.pop(0) if left and on in path and method == "GET" else None


def test_processes_of_a_node_fetch_a_source_once_and_take_no_half(store: ObjectStore):
    store.fault = failing(503, "half", 500, on="proteins")
    other = process_of(local_path, FASTA)
    other.start()
    first = local_path(FASTA)
    other.join()
    assert other.exitcode == 0
    assert gzip.decompress(first.read_bytes()).count(b">") == 120
    assert store.requests["GET", "/bucket/data/proteins.fasta.gz"] == 4, "three that failed and one"
    store.requests.clear()
    assert local_path(Path(FASTA)) == first and not store.requests["GET", "/bucket/data/proteins.fasta.gz"]


def test_a_changed_object_is_another_copy_and_the_least_recently_used_goes(store: ObjectStore, tmp_path: Path):
    use_node("cache", tmp_path, cache_gb=250e-9)
    paths = []
    for number in range(3):
        (tmp_path / "file").write_bytes(bytes([number]) * 100)
        upload(tmp_path / "file", "s3://bucket/changing/file")
        paths.append(local_path("s3://bucket/changing/file"))
        remote._locks.pop(paths[-1].parent).close()  # as if this process had ended: a live process keeps its copies
    assert [path.exists() for path in paths] == [False, True, True]
    assert paths[2].read_bytes() == bytes([2]) * 100
    use_node("cache", tmp_path, cache_gb=50e-9)
    (tmp_path / "file").write_bytes(bytes(101))
    upload(tmp_path / "file", "s3://bucket/changing/file")
    with pytest.raises(ResourceError, match=r"changing/file: 1\.01e-07 GB do not fit .*raise storage\.cache_gb"):
        local_path("s3://bucket/changing/file")


@pytest.mark.parametrize(
    ("uri", "kind", "words"),
    [
        ("s3://bucket/none.fasta", DataError, "not found"),
        ("gs://bucket/x.fasta", ConfigError, "the package gcsfs is not installed; run: pip install gcsfs"),
        ("s4://bucket/x.fasta", ConfigError, "unsupported protocol .*use s3"),
        ("s3://me:secret@bucket/x.fasta", ConfigError, "address contains a password"),
        ("s3://bucket/../x.fasta", ConfigError, r"or '\.\.'"),
    ],
)
def test_a_uri_that_can_not_be_fetched_is_one_line(store: ObjectStore, uri: str, kind: type[EsmerayError], words: str):
    with pytest.raises(kind, match=words) as refused:
        local_path(uri)
    assert "\n" not in str(refused.value) and "secret" not in str(refused.value)


def test_a_store_that_stays_away_is_reported_and_then_one_line(store: ObjectStore, monkeypatch: pytest.MonkeyPatch):
    clock = SimpleNamespace(monotonic=iter(range(100)).__next__, sleep=lambda seconds: None)
    monkeypatch.setattr("esmeray.common.remote.time", clock)
    store.fault = lambda method, path: 503
    lines: list[str] = []
    words = f"{FASTA}: .*Unavailable; check the address, the credentials and the object store"
    with pytest.raises(ResourceError, match=words) as refused:
        remote.retried(lambda: listing(FASTA), FASTA, 30.0, lines.append)
    assert "\n" not in str(refused.value)
    assert len(lines) == 1 and lines[0].endswith("retrying for up to 30 s")


def settings(folder: str | Path, source: str = FASTA, **changes: Any) -> Config:
    checkpoint = {"every_steps": 2, "keep_last": 2}
    ray = {"num_workers": 1, "address": "local"}
    config = tiny_config(Path("unused"), data={"source": [source]}, checkpoint=checkpoint, ray=ray, **changes)
    return config.model_copy(update={"run": config.run.model_copy(update={"storage_path": str(folder)})})


def train_in_this_process(config: dict[str, Any]) -> int:
    """Run the driver without Ray, which takes ten seconds to start."""
    TaskPlan.in_process = True
    try:
        return train(Config.model_validate(config))
    finally:
        TaskPlan.in_process = False


def test_a_killed_run_resumes_on_a_fresh_machine_to_equal_weights(
    store: ObjectStore, tmp_path: Path, process_group: None, capsys: pytest.CaptureFixture[str]
):
    """The run is killed while a checkpoint is uploaded: the partial upload does not count as the newest."""
    expected, config = settings(tmp_path, source=str(local_path(FASTA))), settings("s3://bucket/runs")
    driver = process_of(train_in_this_process, config.model_dump())

    complete: list[str] = []
    begun: list[str] = []

    def kill_at_the_second_file(method: str, path: str) -> int | None:
        step, _, name = path.partition("checkpoints/")[2].partition("/")
        if method == "PUT" and step:
            (complete if name == "manifest.json" else begun).append(step)
            if complete and name != "manifest.json" and begun.count(step) > 1:
                os.kill(driver.pid, signal.SIGKILL)
                return 500
        # On a fast machine the run may end earlier: marking it as finished waits for the kill.
        return 503 if method == "PUT" and path.endswith("outcome.json") else None

    store.fault = kill_at_the_second_file
    driver.start()
    assert train_in_this_process(expected.model_dump()) == 0  # meanwhile: the driver takes as long to start
    driver.join()
    assert driver.exitcode == -signal.SIGKILL
    shutil.rmtree(tmp_path / "cache")
    store.requests.clear()
    store.fault = failing(503, "half", 500, on="_states.pt")
    assert train_in_this_process(config.model_dump()) == 0
    (resumed,) = events(config, "resumed")
    assert resumed["checkpoint"] == complete[-1] < begun[-1]
    assert_same_run(config, expected)
    names = listing(RUN)
    manifests = [name for name in names if name.endswith("manifest.json")]
    assert manifests == [f"checkpoints/step-0000000{step}/manifest.json" for step in (6, 8)]
    assert {"export/model.safetensors", "outcome.json", "curves.png", "config.yaml"} <= names.keys()
    assert f"model        {RUN}/export" in capsys.readouterr().out
    fresh = run_folder(config).path
    shutil.rmtree(tmp_path / "cache")
    assert train_in_this_process(config.model_dump()) == 0
    assert "is finished" in capsys.readouterr().out and not (fresh / "export").exists()


def train_rank(rank: int, config: dict[str, Any], tmp_path: Path, nodes: str, steps: int) -> None:
    """Train a rank on a node of its own and request a stop after ``steps`` steps."""
    use_node(f"{nodes}-{rank}", tmp_path)
    run = RunFolder(config["run"]["storage_path"], "tiny")
    RunMirror(run).pull()

    def stop(metrics: dict[str, float]) -> None:
        if rank == 0 and metrics["step"] == steps:
            run.request_stop()

    context = WorkerContext(rank, 2, 0, report=stop)
    outcome = train_worker(Config.model_validate(config), context, str(tmp_path / "on the driver's disk"), "mine")
    assert outcome.step == steps, outcome


def test_nodes_without_a_shared_folder_train_while_the_store_is_away(
    store: ObjectStore, tmp_path: Path, worker_group: WorkerGroup
):
    config, expected = settings("s3://bucket/apart"), settings("s3://bucket/undisturbed")
    for settings_of_run in (config, expected):
        use_node("driver", tmp_path)
        run = run_folder(settings_of_run)
        run.path.mkdir(parents=True)
        run.wandb_run_id.write_text("mine")
        run.config.write_text("")
        driver = RunMirror(run)
        driver.begin()
    store.fault = failing("half", on="undisturbed/tiny/metrics.jsonl")  # for the driver, which retries
    worker_group.run(train_rank, expected.model_dump(), tmp_path, "undisturbed", 8)
    driver.wait()
    assert run.read_outcome() == Outcome("finished", 8, "trained 8 steps", 0), "worker 0 was on another node"
    assert train_losses(expected).keys() == {*range(1, 9)}
    run.request_stop()
    driver.wait()
    assert listing("s3://bucket/undisturbed/tiny/stop.requested")
    driver.close()

    def away_until_step_6(method: str, path: str) -> int | None:
        metrics = remote.work_path("s3://bucket/apart/tiny") / "metrics.jsonl"
        losses = metrics.exists() and sum(record["kind"] == "train" for record in read_metrics(metrics))
        return 503 if 2 <= losses < 6 and path.startswith("/bucket/apart") else None

    use_node("first-0", tmp_path)
    store.fault = away_until_step_6
    worker_group.run(train_rank, config.model_dump(), tmp_path, "first", 6)
    store.fault = lambda method, path: None
    use_node("driver", tmp_path)
    remove("s3://bucket/apart/tiny/outcome.json")
    worker_group.run(train_rank, config.model_dump(), tmp_path, "others", 8)
    for name in ("first-0", "first-1", "others-0", "others-1"):
        use_node(name, tmp_path)
        shards = {path.name[:15] for path in run_folder(config).checkpoints.rglob("*optim_states.pt")}
        assert shards == {f"zero_pp_rank_{name[-1]}_"}
    use_node("others-0", tmp_path)
    assert [event["step"] for event in events(config, "resumed")] == [6]
    weights = exported_weights(config)
    losses = train_losses(config)
    size = run_folder(config).metrics.stat().st_size
    assert listing("s3://bucket/apart/tiny")["metrics.jsonl"]["size"] == size, "no older copy"
    use_node("undisturbed-0", tmp_path)
    assert losses == train_losses(expected)
    assert all(torch.equal(weights[name], weight) for name, weight in exported_weights(expected).items())


def test_a_job_embeds_from_and_to_the_store_and_resumes_on_a_fresh_machine(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    local = request(tmp_path, outputs=["mean", "residues"])
    run_job(local)
    upload(tmp_path / "proteins.fasta", "s3://bucket/embed/proteins.fasta")
    remote.upload_folder(tmp_path / "model", "s3://bucket/embed/model", "config.json")
    uris = {"input": ["s3://bucket/embed/proteins.fasta"], "models": ["s3://bucket/embed/model"]}
    job = replace(local, output=Path("s3://bucket/embed/out"), **uris)
    left, write = [0, 1], ShardFiles.write

    def interrupted(self: ShardFiles, *arguments: Any) -> Any:
        if not left:
            raise KeyboardInterrupt
        left.pop()
        return write(self, *arguments)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(ShardFiles, "write", interrupted)
        run_job(job)
    shutil.rmtree(tmp_path / "cache")
    store.fault = failing(503, "half", 500, "half", on="safetensors")
    written: list[Any] = []
    monkeypatch.setattr(ShardFiles, "write", lambda self, *arguments: written.append(0) or write(self, *arguments))
    (report,) = run_job(job)
    rows = [path for path in store.requests if path[0] == "PUT" and "/rows/" in path[1]]
    assert report["proteins"] == 12 and len(written) == len(rows) - 2
    assert final_bytes(local_path("s3://bucket/embed/out")) == final_bytes(local.output)
    assert not listing("s3://bucket/embed/out.partial")
    (again,) = run_job(job)
    assert again == report and len(written) == len(rows) - 2
    with pytest.raises(ConfigError, match="another job"):
        run_job(replace(job, outputs=["max"]))
    run_job(replace(job, outputs=["max"]), overwrite=True)
    assert not any("mean" in name for name in listing("s3://bucket/embed/out"))


def test_a_manifest_or_a_folder_of_others_removes_nothing_from_the_store(store: ObjectStore, tmp_path: Path):
    job = replace(request(tmp_path), output=Path("s3://bucket/others/out"))
    for name in ("victim/a", "out.partial/mine"):
        write(f"s3://bucket/others/{name}", "a thesis")
    with pytest.raises(ConfigError, match=r"s3://bucket/others/out\.partial: already exists"):
        run_job(job)
    remove("s3://bucket/others/out.partial")
    write(f"s3://bucket/others/out/{MADE_FILE}", json.dumps({"made_by": "embed", "files": {"../victim": "0"}}))
    before = listing("s3://bucket/others")
    with pytest.raises(DataError, match=r"'\.\./victim' is not the name of a file in its folder"):
        run_job(job, overwrite=True)
    assert listing("s3://bucket/others") == before
    cache = tmp_path / "cache" / "files"
    (cache / "mine").mkdir(parents=True)
    (cache / "mine" / "a").write_bytes(bytes(2000))
    use_node("cache", tmp_path, cache_gb=1e-6)
    assert local_path("s3://bucket/others/victim/a").read_text() == "a thesis"
    assert (cache / "mine" / "a").exists(), "a user's own folder is no copy"


def test_a_file_at_a_uri_is_replaced_with_overwrite_alone(store: ObjectStore, tmp_path: Path):
    uri = "s3://bucket/out/predictions.csv"

    def make(text: str, overwrite: bool = False) -> None:
        target = remote.target_path(Path(uri), overwrite)
        with made_file(target, "predict", overwrite) as building:
            building.write_text(text)
        remote.publish(Path(uri))

    make("first")
    with pytest.raises(
        ConfigError, match=r"predictions\.csv: already exists and was written by Esmeray; choose another name"
    ):
        make("second")
    make("third", overwrite=True)
    assert local_path(uri).read_text() == "third"
    (tmp_path / "mine").write_text("mine")
    remove("s3://bucket/out")
    upload(tmp_path / "mine", uri)
    with pytest.raises(ConfigError, match="was not written by Esmeray"):
        make("fourth", overwrite=True)
    assert local_path(uri).read_text() == "mine"


def kill(*_: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("address", ["s3://bucket/ended", "file://{}/ended"])
def test_an_upload_killed_after_its_manifest_leaves_nothing(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, address: str
):
    uri = f"{address.format(tmp_path)}/out"
    with made_folder(remote.target_path(Path(uri)), "embed", False) as building:
        (building / "a").write_text("text")
    with pytest.raises(KeyboardInterrupt), monkeypatch.context() as patched:
        patched.setattr(remote, "remove", kill)
        remote.publish(Path(uri))
    assert listing(f"{uri}.partial")
    remote.target_path(Path(uri))
    assert not listing(f"{uri}.partial") and {*listing(uri)} == {"a", MADE_FILE}
    folder = tmp_path / "ended" / "out.partial"
    folder.mkdir(parents=True)  # the state after a kill between the removal of the record and of its folder
    remote.target_path(Path(uri))
    assert address.startswith("s3") or not folder.exists()


@pytest.mark.parametrize("name", ["index.json", "text"])
def test_a_write_to_a_folder_that_is_killed_is_taken_up_by_the_next(tmp_path: Path, monkeypatch, name: str):
    """The partial file's name is fixed: one with a random part would never be removed."""
    uri = f"file://{tmp_path}/{name}"
    with pytest.raises(KeyboardInterrupt), monkeypatch.context() as patched:
        patched.setattr(Path, "replace", kill)
        write(uri, "half")
    write(uri, "whole")
    assert [path.name for path in tmp_path.iterdir()] == [name] and remote.read(uri) == b"whole"


def test_scratch_folders_of_a_killed_copy_are_swept(tmp_path: Path, store: ObjectStore):
    copy = local_path(FASTA).parent
    scratch = copy.with_name(f".{copy.name}.scratch-12345678")
    scratch.mkdir()
    local_path(FASTA)
    assert not scratch.exists()


def test_a_folder_whose_upload_was_cut_short_is_named_as_the_user_gave_it(
    store: ObjectStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "part").write_text("text")
    upload(tmp_path / "part", "s3://bucket/short/part")
    for open_folder in (read_embeddings, open_index):
        with pytest.raises(DataError, match=r"^s3://bucket/short: (no|nothing)"):
            open_folder("s3://bucket/short")
    words = f"search s3://bucket/short --search.output {tmp_path / 'hits'} --storage.cache_folder {tmp_path / 'copies'}"
    assert command_line.run(lambda _: esmeray.main(["embed", *words.split()])) == 3
    assert "error: s3://bucket/short: no embeddings found" in capsys.readouterr().err


@pytest.mark.parametrize("failing", [2, 4, 5])
def test_a_replacement_that_is_cut_short_is_swept_by_the_same_command(store: ObjectStore, monkeypatch, failing: int):
    uri = "s3://bucket/replaced/out"

    def make(text: str) -> None:
        with made_folder(remote.target_path(Path(uri), True), "embed", True) as building:
            for name in ("a.json", "b.json", "c"):
                (building / name).write_text(text)
        remote.publish(Path(uri))

    calls = count(1)

    def cut_short(path: Path, uri: str) -> None:
        if next(calls) == failing:
            raise KeyboardInterrupt
        upload(path, uri)

    make("old")
    with pytest.raises(KeyboardInterrupt), monkeypatch.context() as patched:
        patched.setattr(remote, "upload", cut_short)
        patched.setattr(remote, "write", lambda *_: cut_short(Path(), uri))
        make("new")
    assert {(local_path(uri) / name).read_text() for name in listing(uri) if name != MADE_FILE} == {"old"}
    make("new")
    assert {(local_path(uri) / name).read_text() for name in ("a.json", "b.json", "c")} == {"new"}
    assert sorted(name.partition("/")[2] for name in remote._objects(uri)) == ["", "a.json", "b.json", "c", MADE_FILE]
