"""Policies apply to the records that they are about, and each application is counted."""

import numpy as np
import pytest
import xxhash

from esmeray.common.errors import DataError
from esmeray.dataset.fasta.reader import RecordBatch
from esmeray.dataset.fasta.records import Records
from esmeray.dataset.section import IngestSection
from esmeray.dataset.store.ingest import CleanBlock, Ingest


def batch(*records: tuple[str, str]) -> RecordBatch:
    headers, sequences = [header.encode() for header, _ in records], [sequence.encode() for _, sequence in records]
    return RecordBatch(Records.of(headers, sequences))


def pairs(block: CleanBlock | None) -> list[tuple[str, str]]:
    if block is None:
        return []
    ends = np.cumsum(block.lengths)
    return [
        (name.decode(), block.residues[end - length : end].decode())
        for name, end, length in zip(block.ids.split(), ends, block.lengths, strict=True)
    ]


def refused(ingest: Ingest, *batches: RecordBatch) -> tuple[str, ...]:
    with pytest.raises(DataError) as raised, ingest.faults.raised_at_end():
        for one in batches:
            ingest.clean(one)
    return raised.value.problems


def applied(ingest: Ingest) -> dict[str, int]:
    return {name: number for name, number in ingest.counts if number and name != "records_read"}


def test_repairs_are_counted():
    ingest = Ingest(IngestSection())
    block = ingest.clean(batch(("a one", "mkv"), ("b", "MK*"), ("c", "MJJ"), ("d", "MKL")))
    assert pairs(block) == [("a", "MKV"), ("b", "MK"), ("c", "MXX"), ("d", "MKL")]
    assert block.hashes.tolist() == [xxhash.xxh3_64_intdigest(text) for text in (b"MKV", b"MK", b"MXX", b"MKL")]
    assert applied(ingest) == {"records_upper_cased": 1, "stops_dropped": 1, "j_to_x": 2}


def test_bad_characters_become_x_and_one_stop_at_the_end_is_dropped():
    ingest = Ingest(IngestSection(bad_characters="to_x"))
    assert pairs(ingest.clean(batch(("a", "M-K1*"), ("b", "MKL")))) == [("a", "MXKX"), ("b", "MKL")]
    assert applied(ingest) == {"bad_characters_to_x": 2, "stops_dropped": 1}
    ingest = Ingest(IngestSection(bad_characters="to_x"))
    assert pairs(ingest.clean(batch(("a", "M*K"), ("b", "MK**")))) == [("a", "MXK"), ("b", "MKX")], "but the last"


def test_records_that_are_skipped_leave_their_id_free():
    ingest = Ingest(IngestSection(bad_characters="skip", empty_sequences="skip"))
    assert pairs(ingest.clean(batch(("a", "M-K"), ("a", ""), ("b", "*"), ("a", "MKL")))) == [("a", "MKL")]
    assert ingest.clean(batch(("d", ""))) is None
    assert applied(ingest) == {"records_skipped_bad_characters": 1, "records_skipped_empty": 3}


def test_the_first_of_an_id_is_kept_within_and_across_batches():
    ingest = Ingest(IngestSection(duplicate_ids="first"))
    assert pairs(ingest.clean(batch(("a", "MK"), ("a", "ML"), ("b", "MM")))) == [("a", "MK"), ("b", "MM")]
    assert pairs(ingest.clean(batch(("b", "MN"), ("c", "MP")))) == [("c", "MP")]
    assert applied(ingest) == {"records_skipped_duplicate_id": 2}


def test_renamed_ids_stay_unique_even_beside_ids_that_look_renamed():
    ingest = Ingest(IngestSection(duplicate_ids="rename"))
    names = [name for name, _ in pairs(ingest.clean(batch(("a", "MK"), ("a", "ML"), ("a.2", "MM"), ("a", "MN"))))]
    names += [name for name, _ in pairs(ingest.clean(batch(("a.2", "MP"), ("a", "MQ"))))]
    assert names == ["a", "a.3", "a.2", "a.4", "a.2.2", "a.5"]
    assert applied(ingest) == {"ids_renamed": 4}


@pytest.mark.parametrize("policy", ["error", "to_x", "skip"])
def test_a_header_inside_a_sequence_line_is_refused_under_every_policy(policy):
    (problem,) = refused(Ingest(IngestSection(bad_characters=policy)), batch(("a", "MKV>b")))
    assert "'>' inside a sequence line" in problem


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
def test_records_of_dna_are_counted_and_short_peptides_are_not(sequences, number):
    records = batch(*((f"id{index}", sequence) for index, sequence in enumerate(sequences)))
    ingest = Ingest(IngestSection())
    assert len(ingest.clean(records).lengths) == len(sequences)
    assert ingest.counts.records_like_nucleotides == number
    if number:
        problems = refused(Ingest(IngestSection(nucleotides="error")), records)
        assert len(problems) == (1 if number == 1 else number + 1)
        assert "as in DNA or RNA; translate it to protein, or give --data.ingest.nucleotides warn" in problems[-1]
