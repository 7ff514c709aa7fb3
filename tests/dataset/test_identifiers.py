import pytest
from hypothesis import given
from hypothesis import strategies as st

from esmeray.common.errors import DataError
from esmeray.dataset.identifiers import accession, match_ids

ACCESSIONS = st.one_of(
    st.from_regex(r"[OPQ][0-9][A-Z0-9]{3}[0-9]", fullmatch=True),
    st.from_regex(r"[A-NR-Z][0-9]([A-Z][A-Z0-9]{2}[0-9]){1,2}", fullmatch=True),
)
SPELLINGS = (
    "{}",
    "UniProtKB:{}",
    "uniprot:{}",
    "gb|{}|",
    "gi|4504347|ref|{}|",
    "sp|{}|NAME_HUMAN",
    "tr|{}|{}_9BACT",
    "sp|{}",
    "SP|{}|X",
    "{}.2",
    "{}-2",
    "sp|{}-3|NAME_HUMAN",
)


@given(ACCESSIONS, st.sampled_from(SPELLINGS), st.sampled_from(SPELLINGS))
def test_every_spelling_of_an_accession_matches_every_other(name, left, right):
    left_id, right_id = left.format(name, name), right.format(name, name)
    assert match_ids([left_id], [right_id], "left", "right") == {left_id: right_id}


@pytest.mark.parametrize("name", ["design-1", "domain.2", "d12asa_", "chr1.1", "A-1", "sp1", "a|b|c"])
def test_names_that_are_no_accession_stay_as_they_are(name):
    assert accession(name) == name


def test_an_equal_id_comes_before_one_of_the_same_accession():
    assert match_ids(["P12345-2"], ["P12345-2", "P12345"], "left", "right") == {"P12345-2": "P12345-2"}


def test_an_id_that_matches_several_is_refused_by_name():
    with pytest.raises(DataError, match=r"table: id 'P12345' matches 'P12345-1', 'P12345-2' of vectors"):
        match_ids(["P12345"], ["P12345-1", "P12345-2"], "table", "vectors")


def test_fewer_than_half_of_both_sides_are_refused_with_three_ids_of_each():
    left, right = [f"a{n}" for n in range(9)], [f"b{n}" for n in range(9)]
    with pytest.raises(
        DataError, match="0 of 9 ids match vectors: 'a0', 'a1', 'a2' compared with 'b0', 'b1', 'b2'; use"
    ):
        match_ids(left, right, "table", "vectors")


def test_a_small_file_goes_with_a_large_one_and_lacks_are_left_out():
    large = [f"P{n:05d}" for n in range(1000)]
    assert match_ids(["P00007", "x"], large, "few", "many") == {"P00007": "P00007"}
    assert match_ids(large, ["P00007", "x"], "many", "few") == {"P00007": "P00007"}


def test_the_nearest_spelling_of_an_id_is_taken():
    known = ["sp|P12345|A_HUMAN", "sp|P12345-2|A_HUMAN", "sp|P12345-3|A_HUMAN", "NP_000509.1", "NP_000509.2"]
    expected = {"P12345": known[0], "P12345-2": known[1], "P12345-9": known[0], "ref|NP_000509.2|": known[4]}
    assert match_ids(expected, known, "left", "right") == expected


def test_once_leaves_a_farther_spelling_without_a_match():
    assert match_ids(["P12345-2", "P12345"], ["P12345"], "left", "right", once=True) == {"P12345": "P12345"}
    with pytest.raises(DataError, match=r"left: ids 'P12345-2' and 'P12345-3' match 'P12345' of right; keep one"):
        match_ids(["P12345-2", "P12345-3"], ["P12345"], "left", "right", once=True)


def test_a_share_of_0_refuses_nothing():
    assert match_ids(["a", "b"], ["c", "d"], "left", "right", share=0) == {}
