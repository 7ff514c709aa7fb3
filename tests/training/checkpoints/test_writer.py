import pytest
import torch

from esmeray.common.errors import CheckpointError, ResourceError
from esmeray.run_folder.checkpoints import CheckpointStore
from esmeray.training.checkpoints.writer import CheckpointWriter, copy_to_host, load_tensors
from esmeray.training.section import CheckpointSection
from tests.runs import a_manifest


def begun(store: CheckpointStore, step: int = 1, rank: int = 0, world_size: int = 1, **options) -> CheckpointWriter:
    """A writer that writes a checkpoint in the background."""
    shards = options.pop("shards", [(f"{rank}.pt", torch.ones(1))])
    writer = CheckpointWriter(store, rank, range(world_size), CheckpointSection())
    writer.write(shards, a_manifest(step, world_size, **options))
    return writer


def test_checkpoint_exists_only_when_every_rank_has_written(tmp_path):
    store = CheckpointStore(tmp_path)
    first = begun(store, rank=0, world_size=2)
    assert store.complete() == []
    begun(store, rank=1, world_size=2).wait()
    first.wait()
    (folder,) = store.complete()
    assert {entry.name for entries in folder.verify().files.values() for entry in entries} == {"0.pt", "1.pt"}


def test_state_that_changes_while_it_is_written_is_saved_as_it_was(tmp_path):
    store = CheckpointStore(tmp_path)
    weights = torch.zeros(1_000_000)
    copy = copy_to_host({"weights": weights[:10]})
    weights.fill_(1.0)
    begun(store, shards=[("0.pt", copy)]).wait()
    assert not load_tensors(store.complete()[0].path / "0.pt")["weights"].any()
    assert (store.complete()[0].path / "0.pt").stat().st_size < 10_000, "a view does not drag its storage along"


def test_last_and_best_are_kept(tmp_path):
    store = CheckpointStore(tmp_path)
    for step, loss in [(1, 0.5), (2, 0.1), (3, 0.4), (4, None), (5, 0.3)]:
        begun(store, step, cost=loss).wait()
    assert [folder.step for folder in store.complete()] == [5, 4, 2]


def test_failed_write_is_raised_at_the_next_check_and_publishes_nothing(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    store = CheckpointStore(blocked / "checkpoints")
    with pytest.raises(ResourceError, match="could not be written"):
        begun(store).wait()
    assert store.complete() == []


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "0.pt").write_bytes((folder / "0.pt").read_bytes()[:-1]), "size or SHA-256"),
        (lambda folder: (folder / "0.pt").write_bytes(bytes((folder / "0.pt").stat().st_size)), "size or SHA-256"),
        (lambda folder: (folder / "0.pt").unlink(), "missing"),
        (lambda folder: (folder / "manifest.json").unlink(), "no manifest"),
        (lambda folder: replace_in(folder / "manifest.json", '"seed": 0', '"seed": 1'), "checksum mismatch"),
        (
            lambda folder: replace_in(folder / "manifest.json", '"0.pt"', '"../0.pt"'),
            "not the name of a file in its folder",
        ),
        (
            lambda folder: replace_in(folder / "manifest.json", '"format_version": 2', '"format_version": 1'),
            "not of format version 2 .*format_version",
        ),
    ],
    ids=["truncated", "changed", "missing", "no manifest", "manifest changed", "file elsewhere", "older version"],
)
def test_damaged_checkpoint_is_refused(tmp_path, damage, message):
    store = CheckpointStore(tmp_path)
    begun(store).wait()
    (folder,) = store.complete()
    damage(folder.path)
    with pytest.raises(CheckpointError, match=message):
        folder.verify()


def replace_in(path, old, new) -> None:
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


@pytest.mark.parametrize("rank", [0, 1])
def test_full_disk_leaves_nothing_of_the_checkpoint_and_says_what_to_do(tmp_path, full_disk, rank):
    shards = [("small.pt", torch.ones(1)), ("large.pt", torch.ones(100_000))]
    with full_disk(16_384), pytest.raises(ResourceError, match=r"disk full.*free some space.*then resumes"):
        begun(CheckpointStore(tmp_path), rank=rank, world_size=2, shards=shards).wait()
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
