"""Indexes on disk: build, extension, kills, damage, and refusal of another model's vectors."""

import json
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from esmeray.common.errors import ConfigError, DataError
from esmeray.common.publishing import MADE_FILE, RECORD_FILE
from esmeray.dataset.embeddings import arrays
from esmeray.dataset.embeddings.manifest import INDEX_FILE
from esmeray.inference.index import build
from esmeray.inference.index.build import IndexSection, make_index
from esmeray.inference.index.search import open_index
from tests.collisions import hashes_of_one_bit
from tests.damage import killed_in_piece, refuse_silence
from tests.embeddings import make_embeddings, random_vectors

CHANNELS = 16
VECTORS = random_vectors(700, CHANNELS)
IDS = [f"p{n}" for n in range(700)]
QUERIES = random_vectors(20, CHANNELS, seed=1)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "PART_BYTES", 300 * CHANNELS * 4)


@pytest.fixture
def sources(tmp_path: Path) -> tuple[Path, Path]:
    first = make_embeddings(tmp_path / "first", VECTORS[:400], IDS[:400])
    return first, make_embeddings(tmp_path / "second", VECTORS[400:], IDS[400:], file_format="npy")


def section(output: Path, **more: object) -> IndexSection:
    return IndexSection(output=output, **more)


def hits(folder: Path | str, top_k: int = 10, **more: int) -> list[list[str]]:
    index = open_index(folder, **more)
    return [index.ids(rows) for rows in index.search(QUERIES, top_k)[0]]


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("kind", ["exact", "compressed"])
def test_an_extended_index_gives_the_hits_of_one_built_at_once(sources, tmp_path, kind):
    first, second = sources
    # A compressed index keeps the clusters of its first vectors: probe all clusters, so that no hit is missed.
    probes = {"probes": 8} if kind == "compressed" else {}
    make_index([first], section(tmp_path / "grown", kind=kind))
    old = open_index(tmp_path / "grown", **probes)
    before = {path: path.stat().st_ino for path in (tmp_path / "grown" / "parts").iterdir()}
    built = make_index([first, second], section(tmp_path / "grown"))
    assert (built.new, built.known, built.manifest.count) == (300, 400, 700)
    assert all(path.stat().st_ino == inode for path, inode in before.items())
    assert old.count == 400 and old.ids(old.search(VECTORS[:1], 1)[0][0]) == ["p0"], "who had it open keeps it"
    at_once = make_index(sources, section(tmp_path / "at_once", kind=kind))
    assert at_once.manifest.count == 700
    # 70 hits make a compressed index score all rows again; each part rounds to fp16 in its own way.
    grown, whole = hits(tmp_path / "grown", 70, **probes), hits(tmp_path / "at_once", 70, **probes)
    if kind == "exact":
        assert grown == whole
    else:
        assert np.mean([len({*one} & {*other}) for one, other in zip(grown, whole, strict=True)]) > 0.97 * 70
    again = make_index([second], section(tmp_path / "grown"))
    assert (again.new, again.known) == (0, 300)


def test_blocks_of_ids_do_not_change_an_index(sources, tmp_path, monkeypatch):
    make_index(sources, section(tmp_path / "whole"))
    for source in sources:
        ids = pq.read_table(source / INDEX_FILE)
        pq.write_table(ids, source / INDEX_FILE, row_group_size=30)
    monkeypatch.setattr("esmeray.inference.index.build.INDEX_ROWS", 70)
    built = make_index([*sources, sources[0]], section(tmp_path / "blocks"))
    assert (built.new, built.known) == (700, 400)
    assert bytes_of(tmp_path / "blocks") == bytes_of(tmp_path / "whole")


@pytest.mark.parametrize("kind", ["exact", "compressed"])
def test_a_killed_build_and_a_killed_extension_resume_to_the_same_bytes(sources, tmp_path, kind):
    output, undisturbed = tmp_path / "index", tmp_path / "undisturbed"
    for source, piece in zip(sources, (2, 1), strict=True):  # sources with two parts and with one part
        before = bytes_of(output) if output.exists() else {}
        with killed_in_piece(piece), pytest.raises(KeyboardInterrupt):
            make_index([source], section(output, kind=kind))
        assert (bytes_of(output) if output.exists() else {}) == before, "the old state is whole"
        with pytest.raises(ConfigError, match="of another job"):
            make_index([*sources, *sources], section(output, kind=kind))
        make_index([source], section(output, kind=kind))
        assert not (tmp_path / "index.partial").exists()
        make_index([source], section(undisturbed, kind=kind))
        assert bytes_of(output) == bytes_of(undisturbed)


@pytest.mark.parametrize("kind", ["exact", "compressed"])
def test_a_flipped_bit_is_refused(sources, tmp_path, kind):
    folder = tmp_path / "index"
    make_index([sources[0]], section(folder, kind=kind))
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != "esmeray.json":
            assert refuse_silence(path, lambda: hits(folder), count=6) == 6, path.name
    refuse_silence(folder / "esmeray.json", lambda: hits(folder), count=12)


def test_a_query_verifies_only_the_blocks_that_it_needs(sources, tmp_path, monkeypatch):
    monkeypatch.setattr(arrays, "_BLOCK", 256)
    folder = tmp_path / "index"
    make_index([sources[0]], section(folder, kind="compressed"))
    files = [folder / "parts" / f"00000.{suffix}" for suffix in ("lists", "safetensors")]
    nearest = [
        refuse_silence(path, lambda: open_index(folder, probes=1).search(QUERIES[:1], 1), count=40) for path in files
    ]
    assert all(0 < noticed < 40 for noticed in nearest), nearest


def test_other_vectors_kinds_and_files_are_refused_and_the_index_stays(sources, tmp_path):
    folder = tmp_path / "index"
    make_index([sources[0]], section(folder))
    before = bytes_of(folder)
    other = make_embeddings(tmp_path / "other", VECTORS[:9], model="large")
    zero = make_embeddings(tmp_path / "zero", np.zeros((3, CHANNELS), np.float32), ["z0", "z1", "z2"])
    for source, output, more, words in [
        (other, folder, {}, "are not comparable; give embeddings of the same model"),
        (zero, folder, {}, "'z0' is a vector of zeros, which has no cosine"),
        (sources[1], folder, {"name": "mean", "kind": "compressed"}, "--index.kind compressed: .*exact"),
        (sources[1], folder, {"metric": "l2"}, "--index.metric l2: .*has metric cosine"),
        (sources[1], sources[0], {}, "already exists"),
    ]:
        with pytest.raises((ConfigError, DataError), match=words):
            make_index([source], section(output, **more))
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"contains notes\.txt, which index did not write"):
        make_index([sources[1]], section(folder))
    (folder / "notes.txt").unlink()
    assert bytes_of(folder) == before
    for queries, words in (random_vectors(1, 9), "16 dimensions"), (np.zeros((1, CHANNELS)), "0 is a vector of zeros"):
        with pytest.raises(DataError, match=words):
            open_index(folder).search(queries.astype(np.float32), 3)


def test_an_index_at_a_uri_grows_without_sending_its_parts_again(sources, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    uri = f"file://{tmp_path / 'bucket' / 'index'}"
    make_index([sources[0]], section(uri))
    parts = tmp_path / "bucket" / "index" / "parts"
    before = {path.name: path.stat().st_mtime_ns for path in parts.iterdir()}
    make_index([sources[1]], section(uri))
    make_index(sources, section(tmp_path / "local"))
    assert hits(uri) == hits(tmp_path / "local")
    assert {path.name: path.stat().st_mtime_ns for path in parts.iterdir()}.items() >= before.items()
    # The state after a kill at the end of the first upload. Files of another job, with its own record, stay.
    record = tmp_path / "bucket" / "index.partial" / RECORD_FILE
    record.parent.mkdir()
    (record.parent / "shard").touch()
    for content, is_kept in (("embed", True), ((tmp_path / "bucket" / "index" / MADE_FILE).read_text(), False)):
        record.write_text(content)
        make_index([sources[1]], section(uri))
        assert record.exists() == (record.parent / "shard").exists() == is_kept
    other = make_embeddings(tmp_path / "other", VECTORS[:1], ["p0"], sequences=["MW"])
    with pytest.raises(DataError, match=f"other: 'p0' has a different sequence in {uri}; give it another id"):
        make_index([other], section(uri))


POOL = ["a", "b", "c", "d", "e", "f"]
RECORDS = st.lists(st.tuples(st.sampled_from(POOL), st.sampled_from(["MKT", "MKV"])), min_size=1, max_size=5)


@settings(max_examples=25, deadline=None)
@given(st.lists(RECORDS, min_size=1, max_size=3), st.booleans())
def test_an_index_has_each_id_once_with_one_sequence(sources, at_once):
    """Ids may collide in any way. Repeated ids within one source stay unchanged."""
    with TemporaryDirectory() as name, hashes_of_one_bit():
        folders = []
        for number, source in enumerate(sources):
            ids, sequences = zip(*source, strict=True)
            vectors = random_vectors(len(source), CHANNELS)
            folders.append(make_embeddings(Path(name, str(number)), vectors, ids, sequences=sequences))
        steps = [folders] if at_once else [[folder] for folder in folders]

        def build_all() -> None:
            for step in steps:
                make_index(step, section(Path(name, "index")))

        pairs = {pair for source in sources for pair in source}
        if len(pairs) > len({record_id for record_id, _ in pairs}):
            with pytest.raises(DataError, match=r"'[a-f]' has a different sequence in .*; give it another id"):
                build_all()
            return
        build_all()
        expected: list[str] = []
        for source in sources:
            known = {*expected}
            expected += [record_id for record_id, _ in source if record_id not in known]
        index = open_index(Path(name, "index"))
        assert index.ids(np.arange(index.count)) == expected
        rows = index.rows(POOL)
        assert rows.tolist() == [expected.index(name) if name in expected else -1 for name in POOL]


def test_an_index_of_an_earlier_version_is_extended(sources, tmp_path, monkeypatch):
    arrays_of = build.id_arrays
    with monkeypatch.context() as patched:
        patched.setattr(build, "id_arrays", lambda blocks: without(arrays_of(blocks), "sequences"))
        make_index([sources[0]], section(tmp_path / "index"))
    assert make_index(sources, section(tmp_path / "index"))[1:] == (300, 400)
    assert open_index(tmp_path / "index").rows(["p1", "p600"]).tolist() == [1, 600]


def without(made: dict[str, np.ndarray], name: str) -> dict[str, np.ndarray]:
    return {key: value for key, value in made.items() if key != name}


def test_a_part_of_another_index_is_refused(sources, tmp_path):
    for name, model in ("mine", "small"), ("other", "large"):
        for number, rows in enumerate([slice(0, 300), slice(300, 600)]):
            vectors = VECTORS[rows] if name == "mine" else -VECTORS[rows]
            source = make_embeddings(tmp_path / f"{name}{number}", vectors, IDS[rows], model=model)
            make_index([source], section(tmp_path / name))
    part = "parts/00001.safetensors"
    (tmp_path / "mine" / "esmeray.json").unlink()  # its manifest would report any foreign file
    shutil.copyfile(tmp_path / "other" / part, tmp_path / "mine" / part)
    with pytest.raises(DataError, match=r"00001\.safetensors: damaged: its checksum differs from the manifest"):
        open_index(tmp_path / "mine")
    manifests = [json.loads((tmp_path / name / "index.json").read_text()) for name in ("mine", "other")]
    manifests[0]["parts"][1] = manifests[1]["parts"][1]
    (tmp_path / "mine" / "index.json").write_text(json.dumps(manifests[0]))
    for use in (open_index, lambda folder: make_index([sources[1]], section(folder))):
        with pytest.raises(DataError, match=r"index\.json: its part parts/00001 belongs to an index"):
            use(tmp_path / "mine")
    (tmp_path / "mine" / "index.json").write_text(json.dumps(manifests[0] | {"parts": []}))
    with pytest.raises(DataError, match=r"index\.json: damaged \(no parts\)"):
        open_index(tmp_path / "mine")
