"""Columns of records give back what they were made of, whole, in parts and joined."""

from hypothesis import given, settings
from hypothesis import strategies as st

from esmeray.dataset.fasta.records import Records

texts = st.text("abMK |", max_size=8).map(lambda text: text.strip().encode())
records = st.lists(st.tuples(texts, texts), max_size=8)


def pairs(columns: Records) -> list[tuple[bytes, bytes]]:
    return list(zip(columns.headers.split(), columns.sequences, strict=True))


def of(given_pairs: list[tuple[bytes, bytes]]) -> Records:
    return Records.of([header for header, _ in given_pairs], [sequence for _, sequence in given_pairs])


@settings(max_examples=100, deadline=None)
@given(first=records, second=records, cut=st.integers(0, 8))
def test_cut_and_joined_records_are_the_same_records(first, second, cut):
    whole = Records.joined([of(first), of(second)])
    assert pairs(whole) == first + second
    cut = min(cut, len(whole))
    again = Records.joined([whole.part(0, cut), whole.part(cut, len(whole))])
    assert pairs(again) == first + second
    assert again.ids.split() == whole.ids.split()
    assert again.hashes.tolist() == whole.hashes.tolist()


@given(record=st.tuples(texts, texts))
def test_the_id_is_the_first_word_of_the_header_as_a_string_has_it(record):
    columns = of([record])
    assert columns.ids.split() == [(record[0].decode().split() or [""])[0].encode()]
    assert columns.ids.joined() == columns.ids.split()[0]
