"""query writes what the service answers, and refuses to replace what it did not make."""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from esmeray.inference.classifier import ClassifierPipeline
from tests.inference.embedding.jobs import write_proteins
from tests.inference.models.opened import opened, rows_of
from tests.model.support import random_sequences
from tests.service.http.test_access import write_keys
from tests.service.serving import Serving

SEQUENCES = random_sequences([9, 30, 9, 14])


@pytest.fixture
def fasta(tmp_path: Path) -> Path:
    return write_proteins(tmp_path / "proteins.fasta", SEQUENCES)


@pytest.mark.parametrize("task", ["mean", "residues"])
def test_vectors_are_written_as_parquet(command, serving: Serving, address: str, fasta: Path, task: str):
    output = fasta.with_name("out.parquet")
    outcome = command(
        f"serve query --query.input {fasta} --query.output {output} --query.address {address} --query.task {task}"
    )
    assert outcome.code == 0 and f"{task} of 4 proteins" in outcome.out, outcome.err
    table = pq.read_table(output)
    assert table["id"].to_pylist() == ["P00000", "P00001", "P00002", "P00003"]
    model = opened(serving.folder / "esm")
    for found, sequence in zip(table["embedding"].to_pylist(), SEQUENCES, strict=True):
        wanted = rows_of(model, [sequence], [task])[task].numpy()
        np.testing.assert_allclose(np.atleast_2d(found), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["places", "helices"])
def test_classes_are_written_as_tsv(command, serving: Serving, address: str, fasta: Path, name: str):
    output = fasta.with_name("out.tsv")
    command.done(
        f"serve query --query.input {fasta} --query.output {output} --query.address {address} --query.task classify "
        f"--query.model {name}"
    )
    heads, *rows = [line.split("\t") for line in output.read_text().splitlines()]
    wanted = ClassifierPipeline.load(serving.folder / name, device="cpu").predict(SEQUENCES)
    assert heads == ["id", "label", "probabilities"] and [row[1] for row in rows] == wanted.labels()
    if name == "places":
        found = np.array([row[2].split(",") for row in rows], float)
        np.testing.assert_allclose(found, wanted.probabilities, rtol=1e-5)


def test_a_key_is_read_from_its_file_or_the_environment(
    command, serving: Serving, fasta: Path, tmp_path: Path, monkeypatch
):
    keys = write_keys(tmp_path / "keys.yaml")
    (tmp_path / "key").write_text(keys["all"] + "\n")
    with serving.address(serving.app(access={"keys": str(tmp_path / "keys.yaml")})) as address:
        asked = ["serve", "query", "--query.input", fasta, "--query.address", address, "--query.output"]
        refused = command(*asked, tmp_path / "a.parquet")
        assert refused.code == 3 and "401: a key is needed" in refused.err and "--query.key_file" in refused.err
        (tmp_path / "wrong").write_text("esm-" + "0" * 43)
        wrong = command(*asked, tmp_path / "a.parquet", "--query.key_file", tmp_path / "wrong")
        assert wrong.code == 3 and "401: the key is wrong" in wrong.err and "0000" not in wrong.err
        assert refused.err.count("\n") == wrong.err.count("\n") == 1
        assert command(*asked, tmp_path / "a.parquet", "--query.key_file", tmp_path / "key").code == 0
        monkeypatch.setenv("ESMERAY_KEY", keys["all"])
        assert command(*asked, tmp_path / "b.parquet").code == 0
    missing = command(*asked, tmp_path / "c.parquet", "--query.key_file", tmp_path / "none")
    assert missing.code == 3 and "none: can't be read" in missing.err
    (tmp_path / "two").write_bytes(b"esm-one\nesm-two\xff\n")
    two = command(*asked, tmp_path / "c.parquet", "--query.key_file", tmp_path / "two")
    assert (two.code, two.err.count("\n")) == (2, 1) and f"{tmp_path / 'two'}: holds no API key" in two.err
    assert "esm-" not in two.err


def test_files_of_others_stay_and_refusals_leave_nothing(command, address: str, fasta: Path):
    output = fasta.with_name("out.parquet")
    query = f"serve query --query.input {fasta} --query.output {output} --query.address"
    output.write_text("a thesis")
    for options in ("", "--overwrite"):
        outcome = command(f"{query} {address} {options}")
        assert outcome.code == 2 and "exists" in outcome.err and output.read_text() == "a thesis"
    output.unlink()
    outcome = command(f"{query} {address} --query.task latents")
    assert outcome.code == 3 and "model esm has no latents" in outcome.err
    assert command(f"{query} http://[").code == 2
    assert sorted(path.name for path in fasta.parent.iterdir()) == ["proteins.fasta"]
    for options in ("", "--overwrite"):
        assert command(f"{query} {address} {options}").code == 0
