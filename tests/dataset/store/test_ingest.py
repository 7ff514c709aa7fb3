"""Each policy applies to its kind of records only, and each application is counted."""

from pathlib import Path

import pytest
import xxhash

from esmeray.common.errors import DataError
from esmeray.dataset.fasta import reader as fasta
from esmeray.dataset.section import IngestSection
from esmeray.dataset.store.conversion import check, convert
from esmeray.dataset.store.reader import Store
from tests.collisions import COLLIDING
from tests.dataset.stores import contents, write_fasta

CASES = {
    "repairs": (
        {},
        [("a one", "mkv"), ("b", "MK*"), ("c", "MJJ"), ("d", "MKL")],
        [("a", "MKV"), ("b", "MK"), ("c", "MXX"), ("d", "MKL")],
        {"records_upper_cased": 1, "stops_dropped": 1, "j_to_x": 2},
    ),
    "bad characters, and one stop at the end alone": (
        {"bad_characters": "to_x"},
        [("a", "M-K1*"), ("b", "MKL"), ("c", "M*K"), ("d", "MK**")],
        [("a", "MXKX"), ("b", "MKL"), ("c", "MXK"), ("d", "MKX")],
        {"bad_characters_to_x": 4, "stops_dropped": 2},
    ),
    "a skipped record leaves its id free": (
        {"bad_characters": "skip", "empty_sequences": "skip"},
        [("a", "M-K"), ("a", ""), ("b", "*"), ("a", "MKL"), ("d", "")],
        [("a", "MKL")],
        {"records_skipped_bad_characters": 1, "records_skipped_empty": 3},
    ),
    "the first of an id": (
        {"duplicate_ids": "first"},
        [("a", "MK"), ("a", "ML"), ("b", "MM"), ("d", "MQ"), ("b", "MN"), ("c", "MP")],
        [("a", "MK"), ("b", "MM"), ("d", "MQ"), ("c", "MP")],
        {"records_skipped_duplicate_id": 2},
    ),
    "renamed ids differ from ids that look renamed": (
        {"duplicate_ids": "rename"},
        [("a", "MK"), ("a", "ML"), ("a.2", "MM"), ("a", "MN"), ("a.2", "MP"), ("a", "MQ")],
        [("a", "MK"), ("a.3", "ML"), ("a.2", "MM"), ("a.4", "MN"), ("a.2.2", "MP"), ("a.5", "MQ")],
        {"ids_renamed": 4},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_policies_apply_within_and_across_batches_and_are_counted(tmp_path, monkeypatch, case):
    policies, given, kept, counts = CASES[case]
    monkeypatch.setattr(fasta, "BATCH_BYTES", 20)
    monkeypatch.setattr(fasta, "CHUNK_BYTES", 8)
    source = write_fasta(tmp_path / "in.fasta", given)
    manifest = convert([str(source)], tmp_path / "store", IngestSection(**policies))
    assert contents(tmp_path / "store") == kept
    hashes = [xxhash.xxh3_64_intdigest(sequence.encode()) for _, sequence in kept]
    assert Store(tmp_path / "store").sequence_hashes.tolist() == hashes
    assert manifest.counts.model_dump(exclude_defaults=True, exclude={"records_read"}) == counts


@pytest.mark.parametrize("policy", ["to_x", "skip"])
def test_a_header_inside_a_sequence_line_is_refused_under_every_policy(tmp_path, policy):
    source = write_fasta(tmp_path / "in.fasta", [("a", "MKV>b")])
    with pytest.raises(DataError, match="'>' inside a sequence line"):
        check([str(source)], IngestSection(bad_characters=policy))


PROTEIN = "MKVLAGDESTRNQFPWYHIC" * 20
DNA = "acgtN" * 80


@pytest.mark.parametrize(
    ("sequences", "number"),
    [
        ([DNA, DNA.upper(), "ACGU" * 40], 3),
        ([DNA[:150]] * 10, 10),  # short reads
        ([DNA, PROTEIN], 1),
        ([PROTEIN] * 3, 0),
        (["GAGAGS" * 60], 0),  # silk
        (["ACGT", "GATTACA", "TACT"], 0),  # short peptides alone
        ([PROTEIN, "ACGT"], 0),
    ],
)
def test_records_of_dna_are_counted_and_short_peptides_are_not(tmp_path: Path, sequences, number):
    source = write_fasta(tmp_path / "in.fasta", ((f"id{n}", sequence) for n, sequence in enumerate(sequences)))
    assert check([str(source)], IngestSection()).counts.records_like_nucleotides == number
    if number:
        with pytest.raises(DataError) as raised:
            check([str(source)], IngestSection(nucleotides="error"))
        assert len(raised.value.problems) == (1 if number == 1 else number + 1)
        message = "as in DNA or RNA; translate it to protein, or give --data.ingest.nucleotides warn"
        assert message in raised.value.problems[-1]


@pytest.mark.parametrize("has_kernel", [True, False])
@pytest.mark.parametrize("policy", ["error", "first", "rename"])
def test_ids_of_one_hash_are_different_ids(tmp_path, monkeypatch, policy, has_kernel):
    if not has_kernel:
        monkeypatch.setattr(fasta, "load_kernel", lambda: None)
    given = [(name, "MK") for pair in COLLIDING for name in pair]
    repeated = [] if policy == "error" else [given[1]]
    source = write_fasta(tmp_path / "in.fasta", [*given, *repeated])
    manifest = convert([str(source)], tmp_path / "store", IngestSection(duplicate_ids=policy))
    renamed = [(f"{given[1][0]}.2", "MK")] if policy == "rename" else []
    assert contents(tmp_path / "store") == [*given, *renamed]
    assert manifest.counts.records_skipped_duplicate_id == (policy == "first")
