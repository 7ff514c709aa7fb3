import json


def test_the_facts_are_counts_lengths_and_origin(command, tmp_path):
    (tmp_path / "in.fasta").write_text(">a\nMKV*\n>b\n" + "L" * 120 + "\n>c\nMKX\n")
    store = tmp_path / "store"
    command.done(f"data convert --data.source {tmp_path / 'in.fasta'} --convert.store {store}")
    facts = json.loads(command("data", "inspect", store, "--verify").out)
    assert facts["lengths"] == {"min": 3, "median": 3.0, "mean": 42.0, "max": 120}
    assert (facts["records"], facts["counts"]["stops_dropped"], facts["verified"]) == (3, 1, "full")
    assert facts["source"][0]["xxh128"]


def test_for_a_fasta_file_the_command_that_makes_a_store_of_it_is_given(command, tmp_path):
    source = tmp_path / "my.proteins.fasta.gz"
    source.touch()
    command.refused(3, "esmeray data convert --data.source FASTA --convert.store STORE\n", "data", "inspect", source)
