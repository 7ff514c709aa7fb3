"""An index with valid checksums and hostile content is refused in one line, or returns correct hits only."""

import json
import os
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest

from esmeray.common.errors import DataError, refuse_special
from esmeray.common.publishing import MADE_FILE, file_xxh128
from esmeray.dataset.embeddings.arrays import BLOCKS, open_arrays, write_arrays, write_checksums
from esmeray.inference.index import build
from esmeray.inference.index.build import IndexSection, make_index
from esmeray.inference.index.parts import IndexManifest
from esmeray.inference.index.search import open_index
from tests.damage import same
from tests.embeddings import make_embeddings, random_vectors

CHANNELS, ROWS, LISTS = 16, 500, 4
VECTORS = random_vectors(ROWS, CHANNELS)
QUERIES = random_vectors(20, CHANNELS, seed=1)
PART = "parts/00001"
Change = Callable[[Path], object]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with an index of each kind, with two parts and the metric L2."""
    return make_sound(tmp_path_factory.mktemp("hostile"))


def make_sound(folder: Path) -> Path:
    source = make_embeddings(folder / "source", VECTORS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "PART_BYTES", ROWS * CHANNELS * 3)
        patch.setattr(build, "num_lists", lambda rows, channels: LISTS)
        make_index([source], IndexSection(output=folder / "exact", kind="exact", metric="l2"))
        make_index([source], IndexSection(output=folder / "compressed", kind="compressed", metric="l2"))
    return folder


def sealed(folder: Path) -> None:
    """Update every checksum of an index."""
    (folder / MADE_FILE).unlink(missing_ok=True)
    for path in folder.rglob(f"*{BLOCKS}"):
        large = path.with_name(path.name.removesuffix(BLOCKS))
        if large.is_file() and large.stat().st_size:
            write_checksums(large)
    with suppress(ValueError, OSError, KeyError, AttributeError, TypeError, RecursionError):
        # Not of a manifest or a folder that is changed itself.
        content = json.loads((folder / "index.json").read_text())
        for number, part in enumerate(content["parts"]):
            for name in part["files"]:
                refuse_special(folder / name)
                part["files"][name] = file_xxh128(folder / name)
            if part.get("continues"):
                before = {**content, "parts": content["parts"][:number]}
                part["continues"] = IndexManifest.model_validate(before).identity()
        (folder / "index.json").write_text(json.dumps(content))


def change(write: Callable[..., object]) -> Callable[..., Change]:
    """Decorator: a call of ``write`` without its folder returns a change, which is a function of the folder."""
    return lambda *given, **more: lambda folder: write(folder, *given, **more)


@change
def content(folder: Path, name: str, made: Callable[[bytes], bytes]) -> None:
    """Replace the bytes of a file."""
    (folder / name).write_bytes(made((folder / name).read_bytes()))


@change
def arrays(folder: Path, **changes: Any) -> None:
    """Rewrite the second part with changed arrays: functions of the old arrays, or None to omit an array."""
    path = folder / f"{PART}.safetensors"
    old = {name: np.array(values) for name, values in open_arrays(path).items()}
    new = {name: made(old[name]) for name, made in changes.items() if made}
    write_arrays(path, {name: new.get(name, old[name]) for name in old if changes.get(name, "kept")})


def manifest(**changes: Any) -> Change:
    """Rewrite the manifest with other values."""
    return content("index.json", lambda text: json.dumps(json.loads(text) | changes).encode())


@change
def second_part(folder: Path, **changes: Any) -> None:
    parts = json.loads((folder / "index.json").read_text())["parts"]
    manifest(parts=[parts[0], parts[1] | changes])(folder)


@change
def trained(
    folder: Path,
    factory: str,
    channels: int = CHANNELS,
    metric: int = faiss.METRIC_L2,
    rows: int = 0,
    trains: bool = True,
) -> None:
    """Rewrite the clusters with another kind."""
    index: Any = faiss.index_factory(channels, factory, metric)
    sample = random_vectors(300, channels, seed=2)
    if trains:
        index.train(sample)
    if rows:
        index.add(sample[:rows])
    faiss.write_index(index, str(folder / "trained.faiss"))


def rotation(index: Any) -> Any:
    return faiss.downcast_VectorTransform(index.chain.at(0))


def clusters(index: Any) -> Any:
    return faiss.downcast_index(faiss.extract_index_ivf(index))


def centroids(index: Any) -> Any:
    return faiss.downcast_index(clusters(index).quantizer)


@change
def touched(folder: Path, touch: Callable[[Any], object]) -> None:
    """Rewrite the clusters after ``touch`` has changed them."""
    index: Any = faiss.read_index(str(folder / "trained.faiss"))
    touch(index)
    faiss.write_index(index, str(folder / "trained.faiss"))


def set_float(vector: Any, value: float) -> None:
    faiss.rev_swig_ptr(vector.data(), vector.size()).view(np.float32)[0] = value


@change
def lists(
    folder: Path,
    change_ids: Callable[[np.ndarray], np.ndarray] = lambda ids: ids,
    count: int = LISTS,
    code_bytes: int = 0,
    rows: slice = slice(None),
) -> None:
    """Rewrite the second part's lists with other ids (ordered by list), number of lists, or bytes per code."""
    path = str(folder / f"{PART}.lists")
    old: Any = faiss.downcast_InvertedLists(faiss.read_InvertedLists(faiss.FileIOReader(path)))
    made = faiss.ArrayInvertedLists(count, old.code_size + code_bytes)
    for number in range(count):
        size = old.list_size(number % LISTS)
        ids = faiss.rev_swig_ptr(old.get_ids(number % LISTS), size).copy()
        codes = faiss.rev_swig_ptr(old.get_codes(number % LISTS), size * old.code_size).reshape(size, -1)
        codes = np.pad(codes, ((0, 0), (0, max(code_bytes, 0))))[rows, : made.code_size]
        ids, codes = map(np.ascontiguousarray, (change_ids(ids)[rows], codes))
        made.add_entries(number, len(ids), faiss.swig_ptr(ids), faiss.swig_ptr(codes))
    faiss.write_InvertedLists(made, faiss.FileIOWriter(path))


def last(value: float) -> Callable[[np.ndarray], np.ndarray]:
    """Return a function that replaces an array's last value."""
    return lambda array: np.append(array.ravel()[:-1], array.dtype.type(value)).reshape(array.shape)


def filled(value: float) -> Callable[[np.ndarray], np.ndarray]:
    return lambda array: np.full_like(array, value)


def of_dtype(dtype: str) -> Callable[[np.ndarray], np.ndarray]:
    return lambda array: array.astype(dtype)


NUMBERS = [float("nan"), float("inf"), -float("inf"), 3e38]
OF_BOTH: dict[str, Change] = {
    **{f"{name} missing": arrays(**{name: None}) for name in ("ids", "id_offsets", "id_hashes")},
    "sequences fp32": arrays(sequences=of_dtype("float32")),
    "sequences of a row less": arrays(sequences=lambda array: array[:-1]),
    "ids int64": arrays(ids=of_dtype("int64")),
    "ids of fewer bytes": arrays(ids=lambda array: array[:-5]),
    "ids no UTF-8": arrays(ids=filled(-1)),
    "offsets negative": arrays(id_offsets=lambda array: array - 3),
    "offsets beyond": arrays(id_offsets=lambda array: array + 2**40),
    "offsets descending": arrays(id_offsets=lambda array: array[::-1].copy()),
    "offsets fp32": arrays(id_offsets=of_dtype("float32")),
    "offsets uint64": arrays(id_offsets=of_dtype("uint64")),
    "hashes int64": arrays(id_hashes=of_dtype("int64")),
    **{f"rows {rows}": second_part(rows=rows) for rows in (0, -1, 1, 10**18, 2**70, True, "3", None, 1.5)},
    **{f"channels {n}": manifest(channels=n) for n in (0, 1, 8, 15, 17, 2**40, 2**70)},
    **{f"metric {name}": manifest(metric=name) for name in ("hamming", None, 3)},
    **{f"kind {name}": manifest(kind=name) for name in ("flat", None)},
    "version": manifest(format_version=2),
    "no parts": manifest(parts=[]),
    "a list": content("index.json", lambda _: b"[]"),
    "deep": content("index.json", lambda _: b"[" * 100_000),
    "empty": content("index.json", lambda _: b""),
    "part climbs": second_part(name="../../other"),
    "part absolute": second_part(name="/etc/passwd"),
    "part of NUL": second_part(name="a\0b"),
    "part as the first": second_part(name="parts/00000"),
    "long header": content(f"{PART}.safetensors", lambda b: (2**40).to_bytes(8, "little") + b[8:]),
    "no arrays": content(f"{PART}.safetensors", lambda b: b""),
    "eight bytes": content(f"{PART}.safetensors", lambda b: b[:8]),
    "no JSON": content(f"{PART}.safetensors", lambda b: b[:8] + b"\xff" * (len(b) - 8)),
    "half": content(f"{PART}.safetensors", lambda b: b[: len(b) // 2]),
    "a byte less": content(f"{PART}.safetensors", lambda b: b[:-1]),
    "negative offset": content(f"{PART}.safetensors", lambda b: re.sub(rb"\[0, (\d+)\]", rb"[-9,\1]", b, count=1)),
}
EXACT = OF_BOTH | {
    "kind compressed": manifest(kind="compressed"),
    **{f"vectors {dtype}": arrays(vectors=of_dtype(dtype)) for dtype in ("float16", "int8", "int64", "uint16")},
    "vectors transposed": arrays(vectors=lambda array: np.ascontiguousarray(array.T)),
    **{f"a vector's value {value}": arrays(vectors=last(value)) for value in NUMBERS},
    **{f"all vectors {value}": arrays(vectors=filled(value)) for value in NUMBERS},
    **{
        f"{name} {value}": arrays(**{name: last(value)})
        for name in ("centre", "radii", "residuals", "half_squares")
        for value in NUMBERS[:2]
    },
    **{f"{name} negative": arrays(**{name: last(-1.0)}) for name in ("radii", "residuals", "half_squares")},
    **{f"{name} fp16": arrays(**{name: of_dtype("float16")}) for name in ("centre", "radii", "half_squares")},
    **{f"{name} missing": arrays(**{name: None}) for name in ("vectors", "filter", "centre", "radii", "half_squares")},
    "filter fp16": arrays(filter=of_dtype("float16")),
    "filter int8": arrays(filter=of_dtype("int8")),
    "filter NaN": arrays(filter=filled(0x7FC0)),
}
COMPRESSED = OF_BOTH | {
    "kind exact": manifest(kind="exact"),
    **{f"metric {name}": manifest(metric=name) for name in ("dot", "cosine")},
    **{f"codes {dtype}": arrays(codes=of_dtype(dtype)) for dtype in ("float32", "int8", "uint16", "int64")},
    **{f"codes {value}": arrays(codes=filled(value)) for value in NUMBERS[:3]},
    **{f"{name} {value}": arrays(**{name: last(value)}) for name in ("centre", "deviations") for value in NUMBERS},
    **{f"{name} fp16": arrays(**{name: of_dtype("float16")}) for name in ("centre", "deviations")},
    **{f"{name} missing": arrays(**{name: None}) for name in ("codes", "centre", "deviations")},
    **{
        f"clusters {name}": trained(name)
        for name in (
            *("Flat", "IVF4,Flat", "IVF4,SQ8", "IVF4,RaBitQ", "RR16,Flat", "RR16,IVF4,Flat", "RR16,IVF4,PQ4np"),
            *("PCA8,IVF4,RaBitQ", "HNSW8", "RR16,IVF4_HNSW8,RaBitQ", "RR16,IVF5,RaBitQ", "RR16,IVF3,RaBitQ"),
            *(
                "PCA16,IVF4,RaBitQ",
                "RR16,RR16,IVF4,RaBitQ",
                "OPQ4,IVF4,RaBitQ",
                "IDMap,Flat",
                "LSH",
                "RR16,IVF4,RaBitQ4",
            ),
            *("RR16,RaBitQ", "RR16,IVF4,RaBitQfs", "RR8,IVF4,RaBitQ", "L2norm,IVF4,RaBitQ"),
        )
    },
    "clusters of 8 channels": trained("RR8,IVF4,RaBitQ", 8),
    "clusters of 32 channels": trained("RR32,IVF4,RaBitQ", 32),
    "clusters of products": trained("RR16,IVF4,RaBitQ", metric=faiss.METRIC_INNER_PRODUCT),
    "clusters of L1": trained("RR16,IVF4,Flat", metric=faiss.METRIC_L1),
    "clusters without training": trained("RR16,IVF4,RaBitQ", trains=False),
    "clusters with rows": trained("RR16,IVF4,RaBitQ", rows=100),
    "rotation NaN": touched(lambda index: set_float(rotation(index).A, np.nan)),
    "rotation of zeros": touched(lambda index: set_float(rotation(index).A, 1e30)),
    "centroid NaN": touched(lambda index: set_float(centroids(index).codes, np.nan)),
    "fewer centroids": touched(lambda index: centroids(index).reset()),
    **{
        f"clusters: {name} {value}": touched(
            lambda index, name=name, value=value: setattr(clusters(index), name, value),
        )
        for name, value in (
            *(("code_size", 1), ("code_size", 1000), ("nlist", 2), ("nlist", 400), ("by_residual", False)),
            *(("ntotal", 100), ("qb", 0), ("qb", 17), ("d", 8)),
        )
    },
    **{f"clusters of {n} bytes": content("trained.faiss", lambda b, n=n: b[:n]) for n in (0, 3, 40, 300, 1200, 1519)},
    "clusters a binary index": lambda folder: faiss.write_index_binary(
        faiss.IndexBinaryFlat(16), str(folder / "trained.faiss")
    ),
    "clusters missing": lambda folder: (folder / "trained.faiss").unlink(),
    "lists missing": lambda folder: (folder / f"{PART}.lists").unlink(),
    "checksums for a block less": content(f"{PART}.lists{BLOCKS}", lambda b: b[:-8]),
    "ids + 1000": lists(lambda ids: ids + 1000),
    "ids of the first part": lists(lambda ids: ids - 300),
    "ids negative": lists(lambda ids: -ids),
    "ids -1": lists(lambda ids: ids * 0 - 1),
    "ids 2^62": lists(lambda ids: ids + 2**62),
    "ids equal": lists(lambda ids: ids * 0 + 400),
    "an id twice in a list": lists(lambda ids: np.concatenate([ids[:1], ids[:-1]])),
    "an id in two lists": lists(lambda ids: np.concatenate([[400], ids[1:]])),
    "fewer lists": lists(count=LISTS - 1),
    "more lists": lists(count=LISTS + 1),
    "no lists": lists(count=0),
    "fewer rows": lists(rows=slice(2)),
    "codes of a byte more": lists(code_bytes=1),
    "codes of a byte less": lists(code_bytes=-1),
    "codes of 100 bytes more": lists(code_bytes=100),
    **{f"lists of {n} bytes": content(f"{PART}.lists", lambda b, n=n: b[:n]) for n in (0, 3, 30, 40, 80, 200)},
    "lists a byte less": content(f"{PART}.lists", lambda b: b[:-1]),
    "lists elsewhere": content(f"{PART}.lists", lambda b: b"ilod" + b[4:]),
    "lists of none": content(f"{PART}.lists", lambda b: b"il00" + b[4:]),
    "lists of other bytes": content(f"{PART}.lists", lambda b: b"\xff" * len(b)),
}
CASES = {"exact": EXACT, "compressed": COMPRESSED}


def use(folder: Path) -> Any:
    """Search for queries and for the index's own rows; return the hits and all ids."""
    index = open_index(folder)
    rows, scores = index.search(QUERIES, 10)
    own = [(row, hits.tolist()) for row, hits, _ in index.own_hits(np.arange(len(index)), 3)]
    ids = [index.ids(hits[hits >= 0]) for hits in rows]
    return ids, scores, own, index.ids(np.arange(len(index)))


def make_changed(sound: Path, folder: Path, kind: str, change: Change) -> Path:
    target = folder / "index"
    shutil.copytree(sound / kind, target)
    change(target)
    sealed(target)
    return target


@pytest.fixture(scope="module")
def results(sound: Path) -> dict[str, Any]:
    return {kind: use(sound / kind) for kind in CASES}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, cases in CASES.items() for name in cases])
def test_what_no_index_has_is_refused_in_one_line_or_changes_no_hit(sound, results, tmp_path, kind: str, name: str):
    folder = make_changed(sound, tmp_path, kind, CASES[kind][name])
    try:
        result = use(folder)
    except DataError as error:
        assert len(error.problems) == 1 and "\n" not in str(error) and str(folder) in str(error)
    else:
        assert same(result, results[kind])


def test_a_search_refuses_a_file_truncated_or_written_to(sound, tmp_path):
    for kind in CASES:
        folder = make_changed(sound, tmp_path / kind, kind, lambda folder: None)
        index = open_index(folder)
        wanted = index.search(QUERIES, 3)
        part = folder / f"{PART}.safetensors"
        for change in (lambda path: os.truncate(path, 100), lambda path: os.truncate(path, 0)):
            change(part)
            with pytest.raises(DataError, match=rf"{PART}.safetensors: truncated or modified since"):
                index.search(QUERIES, 3)
            shutil.copyfile(sound / kind / f"{PART}.safetensors", part)  # keeps the inode
            index = open_index(folder)
        shutil.copyfile(part, tmp_path / "copy")
        (tmp_path / "copy").rename(part)
        assert same(index.search(QUERIES, 3), wanted)
        shutil.rmtree(folder)
        assert same(index.search(QUERIES, 3), wanted)
