"""Which proteins the benchmarks work on."""

from pathlib import Path

import dnaio

from esmeray.benchmarks.harness.proteins import MAX_RESIDUES, read_proteins, spread_by_length, write_fasta


def test_a_choice_keeps_the_order_of_the_file_and_has_the_shortest_and_the_longest():
    sequences = ["A" * length for length in (5, 900, 3, 40, 7, 100, 60)]
    chosen = spread_by_length(sequences, 3)
    assert [len(sequence) for sequence in chosen] == [900, 3, 40]
    assert [len(sequence) for sequence in spread_by_length(["A" * 3000], 5)] == [MAX_RESIDUES]


def test_a_written_file_repeats_the_sequences_under_ids_of_their_own_and_users_files_are_read(tmp_path: Path):
    path = tmp_path / "p.fasta"
    size = write_fasta(path, ["M" * 130, "GA"], 5)
    with dnaio.open(path) as reader:
        records = [(record.id, record.sequence) for record in reader]
    assert size == path.stat().st_size
    assert len({name for name, _ in records}) == 5
    assert [sequence for _, sequence in records] == ["M" * 130, "GA", "M" * 130, "GA", "M" * 130]
    path.write_text(">a\nmkt*\n>b\nGG\n")
    assert read_proteins(path).sequences == ["MKT", "GG"]
    assert read_proteins(path).facts == {"proteins from": "p.fasta", "proteins there": 2}
