import json

from esmeray.dataset.section import DataSection, SampleSection
from esmeray.dataset.store.conversion import ensure_store


def test_the_report_shows_counts_lengths_composition_and_origin(command, tmp_path):
    (tmp_path / "in.fasta").write_text(">a\nMKV*\n>b\n" + "L" * 120 + "\n>c\nMKX\n")
    store = tmp_path / "store"
    command.done(f"data convert --data.source {tmp_path / 'in.fasta'} --convert.store {store}")
    report = command.done("data", "inspect", store).out.replace("\n", " ")
    for words in ("records   3", "residues  126", "3 to 120, median 3, mean 42", "version 2, lmdb-0.9, 1 block"):
        assert words in report, words
    for words in ("1 final '*' dropped", "in.fasta", "100 to 199", "95.24 %", "--verify reads all"):
        assert words in report, words
    facts = json.loads(command("data", "inspect", store, "--json", "--verify").out)
    bars = [tuple(bar.values()) for bar in facts["lengths"]["histogram"]]
    assert bars == [(0, 50, 2), (50, 100, 0), (100, 200, 1)]
    assert facts["composition"] == {"L": 120, "K": 2, "M": 2, "V": 1, "X": 1}
    assert (facts["records"], facts["counts"]["stops_dropped"], facts["verified"]) == (3, 1, "full")
    assert facts["source"][0]["xxh128"]


def test_the_embedded_sample_is_named_as_the_source(command, tmp_path):
    path = ensure_store(DataSection(sample=SampleSection(records=5, families=1)), tmp_path)
    assert "embedded sample: 5 records, 1 family, seed 0" in command("data", "inspect", path).out


def test_for_a_fasta_file_the_command_that_makes_a_store_of_it_is_given(command, tmp_path):
    source = tmp_path / "my.proteins.fasta.gz"
    source.touch()
    command.refused(3, "esmeray data convert --data.source FASTA --convert.store STORE\n", "data", "inspect", source)
