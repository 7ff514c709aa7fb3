"""Annotations, held-out proteins and clusters are joined with sequences in any notation of the ids."""

import logging
from pathlib import Path

import numpy as np
import pytest

from esmeray.common.errors import DataError
from esmeray.dataset.section import DataSection
from esmeray.function.proteins import FunctionData, prepare, read
from esmeray.function.section import EmbeddingsSection
from esmeray.function.vectors import read_vectors
from tests.embeddings import make_embeddings, random_vectors
from tests.function.test_annotations import MF, diamond, gaf_row

NAMES = [f"P{number:05d}" for number in range(8)]
SEQUENCES = [f"MKTAYIAKQRQISFVKSHFSRQ{letter * 9}" for letter in "ACDEFGHI"]


def prepared(folder: Path, ids: list[str], annotations: str, **terms: object) -> FunctionData:
    diamond(folder)
    (folder / "in.fasta").write_text(
        "".join(f">{name} text\n{seq}\n" for name, seq in zip(ids, SEQUENCES, strict=True))
    )
    (folder / "in.tsv").write_text(annotations)
    paths = {"annotations": str(folder / "in.tsv"), "ontology": str(folder / "terms.obo")}
    data = DataSection.model_validate(
        {"source": [str(folder / "in.fasta")], "validation_share": 0.4, "terms": paths | terms}
    )
    return read(prepare(data, folder / "stores"))


TABLE = "EntryID\tterm\taspect\n" + "".join(f"{name}\tGO:{number % 4 + 1}\tF\n" for number, name in enumerate(NAMES))
ENTRIES = [f"sp|{name}|{name}_HUMAN" for name in NAMES]
MIXED = [*ENTRIES[:3], *(f"tr|{name}|X" for name in NAMES[3:5]), *NAMES[5:]]


@pytest.mark.parametrize("ids", [NAMES, ENTRIES, MIXED])
def test_all_sequences_have_the_annotations_of_their_accession(tmp_path, ids):
    data = prepared(tmp_path, ids, TABLE)
    assert sorted(data.ids[record] for record in data.aspects[MF].records) == sorted(ids)
    (tmp_path / "held_out.txt").write_text("\n".join(NAMES[:2]))
    listed = prepared(tmp_path, ids, TABLE, validation=str(tmp_path / "held_out.txt"))
    assert {listed.ids[record] for record in listed.held_out} == {*ids[:2]}
    (tmp_path / "clusters.tsv").write_text("".join(f"c{number // 2}\t{name}\n" for number, name in enumerate(NAMES)))
    clustered = prepared(tmp_path, ids, TABLE, clusters=str(tmp_path / "clusters.tsv"))
    held_out = np.isin(np.arange(8), clustered.held_out)
    assert (held_out[::2] == held_out[1::2]).all()
    (tmp_path / "clusters.tsv").write_text("".join(f"c\t{name}\n" for name in NAMES[1:]))
    with pytest.raises(DataError, match="no cluster contains"):
        prepared(tmp_path, ids, TABLE, clusters=str(tmp_path / "clusters.tsv"))


def test_proteins_annotated_since_a_date_are_those_of_their_accession(tmp_path):
    dates = ["20200101"] * 6 + ["20220101"] * 2
    rows = "".join(gaf_row(name, "GO:2", date=date) for name, date in zip(NAMES, dates, strict=True))
    data = prepared(tmp_path, ENTRIES, "!gaf-version: 2.1\n" + rows, since="20210101")
    assert {data.ids[record] for record in data.held_out} == {*ENTRIES[6:]}
    with pytest.raises(DataError, match="tables have no dates"):
        prepared(tmp_path, ENTRIES, TABLE, since="20210101")


def test_proteins_without_a_sequence_are_counted_and_most_are_refused(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        prepared(tmp_path, ENTRIES, TABLE + "P99999\tGO:1\tF\n")
    assert "in.tsv: 1 protein without a sequence left out" in caplog.text
    names = ["a", "b", "c", "d", *NAMES[:3], "e"]
    with pytest.raises(
        DataError, match="only 3 of 8 ids match the sequences: 'P00000', 'P00001', 'P00002' compared with 'P"
    ):
        prepared(tmp_path, names, TABLE)


def test_embeddings_are_those_of_the_accession_and_a_lack_is_refused(tmp_path):
    store = prepared(tmp_path, ENTRIES, TABLE).store
    vectors = random_vectors(8, 4)
    order = [store.id(record) for record in range(8)]
    for name, rows in (("whole", range(7, -1, -1)), ("part", range(6))):
        sequences = [SEQUENCES[row] for row in rows]
        make_embeddings(tmp_path / name, vectors[list(rows)], [NAMES[row] for row in rows], sequences=sequences)
    settings = EmbeddingsSection(model="small", store=str(tmp_path / "whole"))
    expected = vectors[[ENTRIES.index(record_id) for record_id in order]]
    np.testing.assert_array_equal(read_vectors(store, settings), expected)
    with pytest.raises(DataError, match=r"part: no embedding for sp\|P0000[67]\|"):
        read_vectors(store, settings.model_copy(update={"store": str(tmp_path / "part")}))
