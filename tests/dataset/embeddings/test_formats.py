"""Embedding files open in the tools that people use for their formats."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pandas as pd
import polars as pl
import pytest
from safetensors.torch import load_file as load_torch_file

from esmeray.common.errors import ConfigError, DataError, EsmerayError
from esmeray.dataset.embeddings.arrays import as_float32, open_arrays, write_arrays
from esmeray.dataset.embeddings.formats.base import Block
from esmeray.dataset.embeddings.formats.hdf5 import biotrainer_key, check_ids
from esmeray.dataset.embeddings.formats.registry import FORMATS
from esmeray.dataset.embeddings.manifest import OutputManifest
from esmeray.dataset.embeddings.reader import read_embeddings
from tests.embeddings import make_embeddings

IDS = ["sp|P1|A", "a/b", "c:1", "d"]
LENGTHS = np.array([3, 5, 8, 13])
VECTORS = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)


def write(path: Path, file_format: str, dtype: Any = "fp32") -> Path:
    """Write the vectors in two blocks."""
    output = OutputManifest(description="", per="protein", channels=6, dtype=dtype, format=file_format)
    with FORMATS[file_format].write(path, output, 4) as append:
        for rows in (slice(0, 3), slice(3, 4)):
            keys = [biotrainer_key(name * 3) for name in "ACDE"[rows]]
            append(Block(IDS[rows], LENGTHS[rows], VECTORS[rows], keys))
    return path


def test_parquet_opens_in_pandas_polars_and_duckdb(tmp_path: Path):
    for dtype, wanted in (("fp32", VECTORS), ("fp16", VECTORS.astype(np.float16))):
        path = write(tmp_path / f"{dtype}.parquet", "parquet", dtype)
        frame = pd.read_parquet(path)
        assert frame.id.tolist() == IDS and frame.length.tolist() == LENGTHS.tolist()
        np.testing.assert_array_equal(np.stack(frame.embedding.tolist()), wanted)
        np.testing.assert_array_equal(pl.read_parquet(path)["embedding"].to_numpy(), wanted)
    # In a child process: DuckDB 2.0 reports its own leaks when a process ends.
    query = f"select id, embedding from '{path}' where length > 4 order by length"
    code = f'import duckdb, json; print(json.dumps(duckdb.sql("{query}").fetchall()))'
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    rows = json.loads(done.stdout)
    assert [row[0] for row in rows] == IDS[1:]
    np.testing.assert_array_equal(np.array([row[1] for row in rows], dtype=wanted.dtype), wanted[1:])


def test_lancedb_opens_a_folder_as_its_database(tmp_path: Path):
    lancedb = pytest.importorskip("lancedb", reason="needs the packages pylance and lancedb")
    folder = make_embeddings(tmp_path / "v", VECTORS, IDS, "lance", block=3, sequences=["M" * 9] * 4)
    table = lancedb.connect(folder).open_table("mean")
    assert table.count_rows() == 4
    assert [row["id"] for row in table.search(VECTORS[2]).limit(1).to_list()] == [IDS[2]]
    np.testing.assert_array_equal(read_embeddings(folder)[1:4], VECTORS[1:4])


def test_a_format_whose_library_is_missing_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "lance", None)
    with pytest.raises(
        ConfigError, match="format lance: the package pylance is not installed; run: pip install pylance"
    ):
        FORMATS["lance"].check()


def test_hdf5_is_read_as_biotrainer_reads_it(tmp_path: Path):
    """Follow biotrainer's reader (1.4): the key is an id or a hash, the attribute original_id has the id."""
    with h5py.File(write(tmp_path / "mean.h5", "hdf5"), "r") as file:
        by_id = {file[key].attrs["original_id"]: np.array(values) for key, values in file.items()}
        np.testing.assert_array_equal(file[biotrainer_key("CCC")][:], VECTORS[1])
    assert sorted(by_id) == sorted(IDS)
    # sha256 of "ACD_3", as biotrainer's calculate_sequence_hash gives it
    assert biotrainer_key("ACD") == "eeb0f924a97be1dfaefc43af2eb118ac55f9b948ede937cb5ac28d4f6984e926"


def test_equal_values_are_equal_files_whenever_they_are_written(tmp_path: Path):
    names = ("parquet", "npy", "hdf5")
    first = [write(tmp_path / f"a.{name}", name).read_bytes() for name in names]
    time.sleep(1.1)  # times in files have a resolution of a second
    assert [write(tmp_path / f"b.{name}", name).read_bytes() for name in names] == first
    assert first[2][8] == 0  # the version of HDF5's superblock that every reader knows


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (["..", "."], "the root group and id"),
        (["a/b", "c", "a_b"], "id 'a/b' and id 'a_b' would both be named 'a_b'"),
    ],
)
def test_ids_that_hdf5_can_not_tell_apart_are_refused(ids, message):
    with pytest.raises(DataError, match=message):
        check_ids(ids)


def test_arrays_open_in_safetensors(tmp_path: Path):
    path, values = tmp_path / "a.safetensors", np.arange(12, dtype=np.float32).reshape(4, 3)
    bits = (values.view(np.uint32) >> 16).astype(np.uint16)
    arrays = {"values": bits, "offsets": np.array([0, 1, 4]), "half": values.astype(np.float16), "single": values}
    write_arrays(path, arrays)
    opened, tensors = open_arrays(path), load_torch_file(path)
    assert all(np.array_equal(opened[name], array) for name, array in arrays.items())
    np.testing.assert_array_equal(as_float32(opened["values"]), values)
    for name in ("values", "single"):
        np.testing.assert_array_equal(tensors[name].float().numpy(), values)


@pytest.mark.parametrize("file_format", ["parquet", "npy"])
def test_vectors_are_found_by_id_number_and_slice(tmp_path: Path, file_format: str):
    opened = read_embeddings(make_embeddings(tmp_path / "v", VECTORS, IDS, file_format, block=3))
    assert (len(opened), opened.channels, opened.ids) == (4, 6, IDS)
    np.testing.assert_array_equal([opened[name] for name in IDS], VECTORS)
    np.testing.assert_array_equal([opened[number] for number in range(-4, 4)], np.tile(VECTORS, (2, 1)))
    for start, stop in ((0, 4), (1, 3), (2, 4), (3, 3), (0, 99)):
        np.testing.assert_array_equal(opened[start:stop], VECTORS[start:stop])
    np.testing.assert_array_equal(np.concatenate([rows for _, rows in opened.blocks(3)]), VECTORS)


def test_unknown_records_and_outputs_are_refused(tmp_path: Path):
    folder = make_embeddings(tmp_path / "v", VECTORS, IDS)
    opened = read_embeddings(folder)
    for key, builtin in (("nobody", KeyError), (4, IndexError), (-5, IndexError)):
        with pytest.raises(builtin, match=f"v: .*{key}") as refused:
            opened[key]
        assert isinstance(refused.value, DataError), "and so an EsmerayError"
    for key in (slice(0, 4, 2), None, 1.5):
        with pytest.raises(EsmerayError):
            opened[key]
    with pytest.raises(ConfigError, match=r"no output 'maen' \(did you mean mean\?\); available: mean"):
        read_embeddings(folder, "maen")
