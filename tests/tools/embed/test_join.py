from pathlib import Path

import numpy as np
import pytest

from esmeray.dataset.embeddings.formats.base import Format
from esmeray.dataset.embeddings.reader import read_embeddings
from tests.embeddings import make_embeddings, random_vectors

IDS = [f"p{n}" for n in range(25)]
SHUFFLED = np.random.default_rng(3).permutation(25)


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Format, "block_rows", lambda self, output: 4)
    return tmp_path


@pytest.mark.parametrize(
    ("kind", "order"),
    [("parquet", np.arange(25)), ("npy", SHUFFLED), ("hdf5", SHUFFLED)],
    ids=["parquet, same order", "npy", "hdf5"],
)
def test_vectors_are_joined_by_id_in_the_order_of_the_first_folder(command, here, kind, order):
    first, second = random_vectors(25, 3), random_vectors(25, 5, seed=1)
    make_embeddings(here / "a", first, IDS, kind)
    make_embeddings(here / "b", second[order], [IDS[n] for n in order], "npy", model="b")
    outcome = command.done("embed", "join", "--join.folders", "a", "b", "--join.output", "ab")
    joined = read_embeddings("ab")
    made = "parquet" if kind == "hdf5" else kind
    assert (joined.ids, joined.output.format, joined.output.columns) == (IDS, made, {"a/mean": 3, "b/mean": 5})
    np.testing.assert_array_equal(joined[:], np.concatenate([first, second], axis=1))
    np.testing.assert_array_equal(joined["p7"], np.concatenate([first[7], second[7]]))
    assert joined.lengths.tolist() == list(range(10, 35))
    assert joined.manifest.job["joined"]["b/mean"] == {"model": "b"}
    assert "25 records with 8 channels, fp32" in outcome.out and "5  b/mean" in outcome.out
    names = {path.name for path in (here / "ab").iterdir()}
    assert names == {"embeddings.json", "esmeray.json", "index.parquet", *joined.output.files}


@pytest.mark.parametrize(("dtypes", "expected"), [(("int8", "int8"), "int8"), (("fp16", "fp32"), "fp32")])
def test_joined_vectors_have_the_dtype_of_the_sources_or_fp32(command, here, dtypes, expected):
    for name, dtype in zip("ab", dtypes, strict=True):
        make_embeddings(here / name, {"mean": random_vectors(25, 3), "cls": random_vectors(25, 3)}, IDS, dtype=dtype)
    command.done("embed join --join.folders a b --join.names cls mean --join.output ab --join.format npy")
    joined = read_embeddings("ab")
    assert joined.output.dtype == expected
    sources = [read_embeddings("a", "cls")[:], read_embeddings("b", "mean")[:]]
    np.testing.assert_array_equal(joined[:], np.concatenate(sources, axis=1))


def test_what_can_not_be_joined_is_one_line_and_nothing_is_written(command, here):
    make_embeddings(here / "a", random_vectors(25, 3), IDS)
    for name, ids in {"fewer": IDS[:12], "more": [*IDS, "extra"], "twice": [*IDS[:-1], "p3"]}.items():
        make_embeddings(here / name, random_vectors(len(ids), 3), ids)
    make_embeddings(here / "residues", random_vectors(25, 3), IDS, per="residue")
    vectors = random_vectors(25, 3)
    vectors[13, 1] = np.inf
    make_embeddings(here / "infinite", vectors, IDS)
    sequences = ["M" * length for length in read_embeddings(here / "a").lengths]
    sequences[7] = "K" + sequences[7][1:]
    make_embeddings(here / "other", random_vectors(25, 3), IDS, sequences=sequences)
    missing = "p12, p13, p14, p15, p16, p17, p18, p19, p20, p21, ..."
    for arguments, code, words in [
        ("a fewer --join.output ab", 3, f"error: fewer: 13 ids of a missing: {missing}\n"),
        ("a more --join.output ab", 3, "error: more: 1 ids not in a: extra\n"),
        ("a twice --join.output ab", 3, "error: twice: 1 ids occurring more than once: p3\n"),
        ("a infinite --join.output ab", 3, "error: infinite: 'p13' has NaN or infinity in mean\n"),
        ("a other --join.output ab", 3, "a: 'p7' has a different sequence in other; embed the same sequences"),
        ("a a --join.output ab --join.names mean meen", 2, "no output 'meen' (did you mean mean?)"),
        ("a a --join.output ab", 2, "given twice"),
        ("a --join.output ab", 2, "--join.folders: list should have at least 2 items"),
        ("a residues --join.output ab", 3, "has values per residue"),
    ]:
        command.refused(code, words, f"embed join --join.folders {arguments}")
    assert not (here / "ab").exists()
