from itertools import chain
from pathlib import Path

import dnaio
import pytest

from benchmarks.harness.proteins import make_store
from benchmarks.harness.split import EVALUE, split
from esmeray.alignment.scoring import scoring
from esmeray.alignment.search import Search
from esmeray.dataset.store.reader import Store
from esmeray.dataset.store.sample import sample_records

pytestmark = pytest.mark.slow


def test_no_protein_is_like_one_of_another_part_and_each_is_in_one(tmp_path: Path):
    sequences = [sequence for _, sequence in sample_records(200, 80, seed=0)]
    fasta, folder = tmp_path / "all.fasta", tmp_path / "parts"
    fasta.write_text("".join(f">{number}\n{sequence}\n" for number, sequence in enumerate(sequences)))
    folder.mkdir()
    parts = {}
    for part, path in split(fasta, folder).items():
        with dnaio.open(path) as records:
            parts[part] = [record.sequence for record in records]
    assert all(parts.values())
    assert sorted(chain.from_iterable(parts.values())) == sorted(sequences)
    part_of = {sequence: part for part, members in parts.items() for sequence in members}
    store = Store(make_store(fasta, tmp_path / "store"))
    search = Search(store, scoring())
    for query in range(0, len(store), 10):
        hits = search.hits(store.sequence(query).tobytes(), len(store), EVALUE)
        assert {part_of[store.text(hit.record)] for hit in hits} == {part_of[store.text(query)]}
