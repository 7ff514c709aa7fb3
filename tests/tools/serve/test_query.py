"""``serve query`` writes the service's answers, and refuses to replace files that it did not write."""

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


def test_vectors_are_written_as_parquet_and_classes_as_tsv(command, serving: Serving, address: str, fasta: Path):
    query = f"serve query --query.input {fasta} --query.address {address} --query.output"
    for task in ("mean", "residues"):
        output = fasta.with_name(f"{task}.parquet")
        assert "4 proteins" in command.done(f"{query} {output} --query.task {task}").out
        table = pq.read_table(output)
        assert table["id"].to_pylist() == ["P00000", "P00001", "P00002", "P00003"]
        model = opened(serving.folder / "esm")
        for found, sequence in zip(table["embedding"].to_pylist(), SEQUENCES, strict=True):
            wanted = rows_of(model, [sequence], [task])[task].numpy()
            np.testing.assert_allclose(np.atleast_2d(found), wanted, rtol=1e-5, atol=1e-5)
    for name in ("places", "helices"):
        output = fasta.with_name(f"{name}.tsv")
        command.done(f"{query} {output} --query.model {name}")
        heads, *rows = [line.split("\t") for line in output.read_text().splitlines()]
        wanted = ClassifierPipeline.load(serving.folder / name, device="cpu").predict(SEQUENCES)
        names = [] if name == "helices" else ["cytoplasm", "membrane", "nucleus"]
        assert heads == ["id", "label", *names] and [row[1] for row in rows] == wanted.labels()
        if names:
            np.testing.assert_allclose([list(map(float, row[2:])) for row in rows], wanted.probabilities, rtol=1e-4)


def test_a_key_is_read_from_its_file_or_the_environment(
    command, serving: Serving, fasta: Path, tmp_path: Path, monkeypatch
):
    keys = write_keys(tmp_path / "keys.yaml")
    (tmp_path / "key").write_text(keys["all"] + "\n")
    with serving.address(serving.app(access={"keys": str(tmp_path / "keys.yaml")})) as address:
        asked = ["serve", "query", "--query.input", fasta, "--query.address", address, "--query.output"]
        refused = command.refused(3, "401: a key is needed", *asked, tmp_path / "a.parquet")
        assert "--query.key_file" in refused.err
        (tmp_path / "wrong").write_text("esm-" + "0" * 43)
        by_file = [*asked, tmp_path / "a.parquet", "--query.key_file"]
        wrong = command.refused(3, "401: the key is wrong", *by_file, tmp_path / "wrong")
        assert "0000" not in wrong.err
        command.done(*by_file, tmp_path / "key")
        monkeypatch.setenv("ESMERAY_KEY", keys["all"])
        command.done(*asked, tmp_path / "b.parquet")
    by_file = [*asked, tmp_path / "c.parquet", "--query.key_file"]
    command.refused(3, "none: can't be read", *by_file, tmp_path / "none")
    (tmp_path / "two").write_bytes(b"esm-one\nesm-two\xff\n")
    two = command.refused(2, f"{tmp_path / 'two'}: holds no API key", *by_file, tmp_path / "two")
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
    command.refused(2, "must end in .parquet or .tsv", f"serve query --query.input {fasta} --query.output a.csv")
    assert sorted(path.name for path in fasta.parent.iterdir()) == ["proteins.fasta"]
    for options in ("", "--overwrite"):
        command.done(f"{query} {address} {options}")
