"""Data of a run: what is kept of the files, who is held out, what is refused."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest

from common.errors import ConfigError, DataError
from dataset.store.conversion import convert
from dataset.store.reader import Store
from function.sample import write_sample
from inference.function.data import prepare, read
from train_config.function_schema import FunctionDataSection, FunctionSampleSection
from train_config.loading import load_function_config
from train_config.schema import IngestSection


@pytest.fixture
def files(tmp_path) -> dict:
    (tmp_path / "made").mkdir()
    write_sample(tmp_path / "made", FunctionSampleSection(records=60, families=12))
    made = tmp_path / "made"
    names = {"annotations": "train.tsv", "ontology": "terms.obo"}
    return {"sequences": [str(made / "train.fasta")]} | {key: str(made / name) for key, name in names.items()}


def held_out(data) -> set[str]:
    return {data.ids[record] for record in data.held_out.tolist()}


def test_the_run_keeps_its_data_when_the_files_are_gone(files, tmp_path):
    section = FunctionDataSection(**files)
    first = prepare(tmp_path / "run", section)
    (tmp_path / "made" / "train.tsv").unlink()
    again = prepare(tmp_path / "run", section)
    assert held_out(first) == held_out(again)
    for name, one in first.aspects.items():
        other = again.aspects[name]
        assert (one.terms != other.terms).nnz == 0 and (one.accretion == other.accretion).all()
        assert not ((one.terms @ one.aspect.parents) > one.terms).nnz, "annotations are propagated"


def test_the_run_keeps_a_store_that_is_given(files, tmp_path):
    convert(files["sequences"], tmp_path / "store", IngestSection())
    section = FunctionDataSection(**files | {"sequences": [str(tmp_path / "store")]})
    first = prepare(tmp_path / "run", section)
    shutil.rmtree(tmp_path / "store")
    again = read(tmp_path / "run", Store(tmp_path / "run" / "sequences"))
    assert held_out(first) == held_out(again) and first.store.checksum == again.store.checksum


def test_listed_proteins_are_held_out(files, tmp_path):
    ids = [line.split("\t")[0] for line in Path(files["annotations"]).read_text().splitlines()][:6]
    (tmp_path / "ids.txt").write_text("\n".join(ids))
    data = prepare(tmp_path / "run", FunctionDataSection(**files, validation=str(tmp_path / "ids.txt")))
    assert held_out(data) == set(ids)


def test_clusters_are_held_out_whole(files, tmp_path):
    names = [line[1:].strip() for line in Path(files["sequences"][0]).read_text().splitlines() if line.startswith(">")]
    rows = [f"{name.partition('_')[0]}\t{name}\n" for name in names]
    (tmp_path / "clusters.tsv").write_text("".join(rows))
    section = FunctionDataSection(**files, clusters=str(tmp_path / "clusters.tsv"), validation_share=0.3)
    chosen = held_out(prepare(tmp_path / "run", section))
    families = {name.partition("_")[0] for name in chosen}
    assert chosen == {name for name in names if name.partition("_")[0] in families}
    (tmp_path / "clusters.tsv").write_text("".join(rows[1:]))
    with pytest.raises(DataError, match=f"no cluster of {names[0]}"):
        prepare(tmp_path / "other", section)


def test_proteins_annotated_since_a_date_are_held_out(files, tmp_path):
    lines = ["!gaf-version: 2.2\n"]
    for line in Path(files["annotations"]).read_text().splitlines():
        protein, term = line.split()
        date = "20240101" if protein.endswith("3") else "20200101"
        row = ["DB", protein, protein, "enables", term, "R:1", "IDA", "", "F", "", "", "protein", "taxon:1", date]
        lines.append("\t".join([*row, "DB", "", ""]) + "\n")
    (tmp_path / "some.gaf").write_text("".join(lines))
    files["annotations"] = str(tmp_path / "some.gaf")
    chosen = held_out(prepare(tmp_path / "run", FunctionDataSection(**files, since="20230101")))
    assert chosen and all(name.endswith("3") for name in chosen)


def test_annotations_without_sequences_are_counted_and_none_at_all_is_refused(files, tmp_path, caplog):
    text = Path(files["annotations"]).read_text()
    (tmp_path / "more.tsv").write_text(text + "P1\tEX:0000001\n")
    with caplog.at_level(logging.WARNING):
        prepare(tmp_path / "run", FunctionDataSection(**files | {"annotations": str(tmp_path / "more.tsv")}))
    assert "1 protein without a sequence" in caplog.text
    (tmp_path / "none.tsv").write_text("P1\tEX:0000001\n")
    with pytest.raises(DataError, match="none of its proteins has a sequence"):
        prepare(tmp_path / "other", FunctionDataSection(**files | {"annotations": str(tmp_path / "none.tsv")}))
    assert not (tmp_path / "other" / "data").exists()


def test_settings_that_do_not_go_together_are_refused():
    for given, words in (
        ({("data", "sequences"): ["a.fasta"]}, "set all three"),
        ({("data", "since"): "2024"}, "since"),
        ({("data", "since"): "20240101", ("data", "validation"): "a"}, "exclude each other"),
        ({("parts",): ["guess"]}, "parts"),
        ({("embeddings", "store"): "embeddings"}, "set model"),
    ):
        with pytest.raises(ConfigError, match=words):
            load_function_config(None, given)
