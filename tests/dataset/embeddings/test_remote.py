"""Reading rows of embeddings at a URI downloads only these rows."""

from pathlib import Path

import numpy as np
import pytest

from esmeray.common.errors import DataError
from esmeray.common.remote import remove, upload, upload_folder
from esmeray.dataset.embeddings.manifest import MANIFEST_FILE, part_name
from esmeray.dataset.embeddings.reader import read_embeddings
from tests.dataset.embeddings.test_damage import make
from tests.embeddings import INSTALLED, make_embeddings, random_vectors
from tests.object_store import ObjectStore, object_store, use_storage

RECORDS, CHANNELS = 400, 1500
URI = "s3://bucket/vectors"


@pytest.fixture(scope="module")
def server():
    with object_store() as store:
        yield store


@pytest.fixture
def store(server: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    use_storage(monkeypatch, cache_folder=str(tmp_path / "cache"))
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")  # Lance has its own client
    yield server
    remove(URI)


def sent(store: ObjectStore) -> int:
    """Bytes sent from files with values since the last call."""
    number = sum(size for path, size in store.sent.items() if not path.endswith((".json", "index.parquet", "bucket")))
    store.sent.clear()
    return number


@pytest.mark.parametrize("file_format", [name for name in INSTALLED if name != "safetensors"])
def test_a_few_rows_are_fewer_bytes_than_the_file(tmp_path: Path, store: ObjectStore, file_format: str):
    vectors = random_vectors(RECORDS, CHANNELS)
    ids = [f"p{number % 50} {number}" for number in range(RECORDS)]
    sequences = ["M" * (10 + number % 50) for number in range(RECORDS)]
    for folder, rows in ((tmp_path / "v", slice(0, 300)), (tmp_path / "v" / part_name(1), slice(300, RECORDS))):
        make_embeddings(folder, vectors[rows], ids[rows], file_format, block=100, sequences=sequences[rows])
    upload_folder(tmp_path / "v", URI, MANIFEST_FILE)
    size = sum((tmp_path / "v" / name).stat().st_size for name in read_embeddings(tmp_path / "v").output.files)
    opened = read_embeddings(URI)
    sent(store)
    np.testing.assert_array_equal(opened["p20 220"], vectors[220])
    np.testing.assert_array_equal(opened[290:310], vectors[290:310])
    assert 0 < sent(store) < size
    np.testing.assert_array_equal(np.concatenate([rows for _, rows in opened.blocks(100)]), vectors)
    assert opened.ids == ids


def test_residues_of_one_record_are_fetched_alone(tmp_path: Path, store: ObjectStore):
    make(tmp_path / "v", "safetensors")
    upload_folder(tmp_path / "v", URI, MANIFEST_FILE)
    store.sent.clear()
    opened, local = read_embeddings(URI), read_embeddings(tmp_path / "v")
    np.testing.assert_array_equal(opened["p1"], local["p1"])
    assert [path for path in store.sent if "safetensors" in path] == ["/bucket/vectors/residues/0.safetensors"]
    assert all(np.array_equal(ours, theirs) for ours, theirs in zip(opened, local, strict=True))


@pytest.mark.parametrize("file_format", INSTALLED)
def test_a_missing_or_shorter_object_is_refused_in_one_line(tmp_path: Path, store: ObjectStore, file_format: str):
    make(tmp_path / "v", file_format)
    upload_folder(tmp_path / "v", URI, MANIFEST_FILE)
    # One file with values; Lance's other files have "_" in their names.
    name = next(name for name in read_embeddings(tmp_path / "v").output.files if "_" not in name)
    path = tmp_path / "v" / name
    path.write_bytes(path.read_bytes()[:-100])
    upload(path, f"{URI}/{name}")
    for _ in range(2):
        with pytest.raises(DataError, match=r"s3://bucket/vectors/.*compute") as refused:
            [*read_embeddings(URI)]
        assert "\n" not in str(refused.value)
        remove(f"{URI}/{name}")


def test_a_part_that_is_lost_is_noticed(tmp_path: Path):
    for folder in (tmp_path / "v", tmp_path / "v" / part_name(2)):
        make_embeddings(folder, random_vectors(4, 8))
    with pytest.raises(DataError, match=r"v: damaged: part-00001 is missing before part-00002"):
        read_embeddings(tmp_path / "v")
