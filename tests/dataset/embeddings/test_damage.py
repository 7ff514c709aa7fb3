"""Damaged or hostile embeddings are refused in one line: no wrong vector, no traceback, no large allocation."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from esmeray.common.errors import DataError
from esmeray.common.publishing import MADE_FILE, made_folder
from esmeray.dataset.embeddings.arrays import open_arrays, write_arrays
from esmeray.dataset.embeddings.manifest import (
    INDEX_FILE,
    MANIFEST_FILE,
    EmbeddingsManifest,
    OutputManifest,
    read_manifest,
    write_manifest,
)
from esmeray.dataset.embeddings.reader import read_embeddings
from tests.damage import flipped, refuse_silence
from tests.embeddings import INSTALLED, make_embeddings, random_vectors


def made(folder: Path, file_format: str) -> Path:
    """Write forty vectors, or the residues of four sequences, like ``embed run``."""
    with made_folder(folder, "embed", overwrite=False) as building:
        building.rmdir()
        make(building, file_format)
    return folder


def make(folder: Path, file_format: str) -> None:
    if file_format != "safetensors":
        make_embeddings(folder, random_vectors(40, 8), file_format=file_format)
        return
    make_embeddings(folder, random_vectors(4, 8))
    (folder / "mean.parquet").unlink()
    (folder / "residues").mkdir()
    files = ["residues/0.safetensors", "residues/1.safetensors"]
    for number, name in enumerate(files):
        write_arrays(folder / name, {"offsets": np.cumsum([0, 10, 11]), "values": random_vectors(21, 8, number)})
    kind: dict[str, Any] = {"description": "residues", "per": "residue", "channels": 8, "dtype": "fp32"}
    output = OutputManifest(**kind, format="safetensors", first_sequences=[0, 2], files=files)
    write_manifest(folder, EmbeddingsManifest(num_records=4, num_sequences=4, outputs={"residues": output}))


def read(folder: Path) -> list[Any]:
    opened = read_embeddings(folder)
    return [opened.ids, opened.lengths, opened.sequences, list(opened)]


@pytest.mark.parametrize("file_format", INSTALLED)
def test_a_flipped_bit_of_any_file_is_noticed(tmp_path: Path, file_format: str):
    folder = made(tmp_path / "v", file_format)
    for path in sorted(path for path in folder.rglob("*.*") if path.is_file()):
        noticed = refuse_silence(path, lambda: read(folder))
        assert noticed == 30 or path.name == MADE_FILE, path


def test_parquet_has_checksums_of_its_own(tmp_path: Path):
    folder = made(tmp_path / "v", "parquet")
    (folder / MADE_FILE).unlink()
    path = folder / "mean.parquet"
    place = path.read_bytes().index(random_vectors(40, 8)[20].tobytes())
    with flipped(path, 8 * place), pytest.raises(DataError, match=r"mean\.parquet: can't be read: .*CRC"):
        read(folder)


def with_manifest(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], Any]:
    def hostile(folder: Path) -> None:
        path = folder / MANIFEST_FILE
        content = json.loads(path.read_bytes())
        change(content)
        path.write_text(json.dumps(content))

    return hostile


def npy(shape: str, descr: str = "<f4") -> Callable[[Path], Any]:
    def hostile(folder: Path) -> None:
        text = f"{{'descr': {descr!r}, 'fortran_order': False, 'shape': {shape}}}".encode()
        (folder / "mean.npy").write_bytes(b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + b"0" * 999)

    return hostile


def hollow(folder: Path) -> None:
    """Write a dataset of a terabyte without data, which HDF5 would read as zeros."""
    with h5py.File(folder / "mean.h5", "w") as file:
        for number in range(40):
            file.create_dataset(f"p{number}", shape=(1 << 38,), chunks=(1 << 20,), dtype="f4")


def parquet_of(columns: dict[str, Any], name: str = INDEX_FILE) -> Callable[[Path], Any]:
    return lambda folder: pq.write_table(pa.table(columns), folder / name)


def output_with(**changes: Any) -> Callable[[Path], Any]:
    return with_manifest(lambda content: content["outputs"]["mean"].update(changes))


MANY = pa.array(np.zeros(1_000_000, np.int64))
HOSTILE: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "outputs is a list": ("npy", with_manifest(lambda content: content.update(outputs=[]))),
    "no manifest": ("npy", lambda folder: (folder / MANIFEST_FILE).unlink()),
    "a missing file": ("npy", lambda folder: (folder / "mean.npy").unlink()),
    "no file": ("npy", output_with(files=[])),
    "a file elsewhere": ("npy", output_with(files=["../mean.npy"])),
    "negative channels": ("npy", output_with(channels=-8)),
    "many channels": ("npy", output_with(channels=10**12)),
    "many records": ("npy", with_manifest(lambda content: content.update(num_records=10**15))),
    "int8 without scales": ("npy", output_with(dtype="int8")),
    "objects": ("npy", npy("(40, 8)", "|O")),
    "a huge shape": ("npy", npy("(9223372036854775807, 8)")),
    "a hollow dataset": ("hdf5", hollow),
    "no column": ("npy", parquet_of({"name": ["a"] * 40})),
    "other kinds": ("npy", parquet_of({"id": list(range(40)), "length": list("ab" * 20), "sequence": [None] * 40})),
    "many rows of few bytes": ("npy", parquet_of({"id": MANY})),
    "no vectors": ("parquet", parquet_of({"id": ["a"] * 40}, "mean.parquet")),
    "texts": ("parquet", parquet_of({"embedding": [["a"] * 8] * 40}, "mean.parquet")),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_folder_is_refused_in_one_line(tmp_path: Path, case: str):
    file_format, harm = HOSTILE[case]
    folder = made(tmp_path / "v", file_format)
    (folder / MADE_FILE).unlink()
    harm(folder)
    with pytest.raises(DataError) as refused:
        read(folder)
    assert "\n" not in str(refused.value) and str(folder) in str(refused.value)


HEADERS = [
    b"[]",
    b"[" * 100_000,
    b'{"a": 1}',
    b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 1e400]}}',
    b'{"a": {"dtype": "F32", "shape": [9223372036854775807, 4], "data_offsets": [0, 16]}}',
    b'{"a": {"dtype": ["F32"], "shape": [4], "data_offsets": [0, 16]}}',
]


def test_a_hostile_header_of_safetensors_is_refused_in_one_line(tmp_path: Path):
    path, words = tmp_path / "shard-a.safetensors", r"safetensors: damaged \(.+\); remove it and compute it again$"
    sizes_and_headers = [(2**63, b""), (2**40, b"{}"), *((len(header), header) for header in HEADERS)]
    for size, header in sizes_and_headers:
        path.write_bytes(size.to_bytes(8, "little") + header + b"0" * 64)
        with pytest.raises(DataError, match=rf"^.*shard-a\.{words}"):
            open_arrays(path)


def grown(folder: Path, output: str = "mean", **changes: Any) -> Path:
    """Write an output with a part, whose job has ``changes``."""
    job = {"model": "small", "settings": {"precision": "fp32"}}
    for path, name, of_part in (folder, "mean", {}), (folder / "part-00001", output, changes):
        make_embeddings(path, {name: random_vectors(6, 4)})
        write_manifest(path, read_manifest(path).model_copy(update={"job": job | of_part}))
    return folder


@pytest.mark.parametrize(
    ("output", "changes", "words"),
    [
        ("mean", {"model": "large"}, "model was 'large', is now 'small'"),
        ("max", {}, "mean was None, is now 'mean over residues'"),
        ("mean", {"settings": {"precision": "bf16"}}, "settings.precision was 'bf16', is now 'fp32'"),
        ("mean", {"continues": "0" * 32}, "continues was '0000"),
    ],
)
def test_a_part_of_another_output_is_refused(tmp_path, output, changes, words):
    with pytest.raises(DataError, match=rf"part-00001: does not belong to this output \({words}.*\); remove it"):
        read_embeddings(grown(tmp_path / "out", output, **changes))


def test_a_part_of_an_earlier_version_names_no_manifest(tmp_path):
    assert len(read_embeddings(grown(tmp_path / "out"))) == 12
