"""Columns of records give back what they were made of, whole, in parts and joined."""

from hypothesis import given, settings
from hypothesis import strategies as st

from esmeray.dataset.fasta.records import Records

texts = st.text("abMK |", max_size=8).map(lambda text: text.strip().encode())
records = st.lists(st.tuples(texts, texts), max_size=8)


def pairs(columns: Records) -> list[tuple[bytes, bytes]]:
    return list(zip(columns.headers.split(), columns.sequences, strict=True))


def of(records: list[tuple[bytes, bytes]]) -> Records:
    return Records.of([header for header, _ in records], [sequence for _, sequence in records])


@settings(max_examples=100, deadline=None)
@given(first=records, second=records, cut=st.integers(0, 8))
def test_cut_and_joined_records_are_the_same_records(first, second, cut):
    whole = Records.joined([of(first), of(second)])
    assert pairs(whole) == first + second
    cut = min(cut, len(whole))
    again = Records.joined([whole.part(0, cut), whole.part(cut, len(whole))])
    assert pairs(again) == first + second
    assert again.ids.split() == whole.ids.split() == [(header.split() or [b""])[0] for header, _ in first + second]
    assert again.hashes.tolist() == whole.hashes.tolist()
