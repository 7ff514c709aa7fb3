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


LARGE = [f"P{n:05d}" for n in range(1000)]
KNOWN = ["sp|P12345|A_HUMAN", "sp|P12345-2|A_HUMAN", "sp|P12345-3|A_HUMAN", "NP_000509.1", "NP_000509.2"]


@pytest.mark.parametrize(
    ("known", "options", "matches"),
    [
        (["P12345-2", "P12345"], {}, {"P12345-2": "P12345-2"}),  # an equal id before one of the same accession
        (KNOWN, {}, {"P12345": KNOWN[0], "P12345-2": KNOWN[1], "P12345-9": KNOWN[0], "ref|NP_000509.2|": KNOWN[4]}),
        (LARGE, {}, {"P00007": "P00007", "x": None}),
        (["P00007", "x"], {}, {name: name if name == "P00007" else None for name in LARGE}),
        (["P12345"], {"once": True}, {"P12345-2": None, "P12345": "P12345"}),
        (["c", "d"], {"share": 0}, {"a": None, "b": None}),
    ],
)
def test_an_id_matches_its_nearest_spelling_or_is_left_out(known, options, matches):
    expected = {name: known_id for name, known_id in matches.items() if known_id is not None}
    assert match_ids(matches, known, "left", "right", **options) == expected


@pytest.mark.parametrize(
    ("ids", "known", "options", "message"),
    [
        (["P12345"], ["P12345-1", "P12345-2"], {}, "table: id 'P12345' matches 'P12345-1', 'P12345-2' of vectors"),
        (
            [f"a{n}" for n in range(9)],
            [f"b{n}" for n in range(9)],
            {},
            "0 of 9 ids match vectors: 'a0', 'a1', 'a2' compared with 'b0', 'b1', 'b2'; use",
        ),
        (
            ["P12345-2", "P12345-3"],
            ["P12345"],
            {"once": True},
            "table: ids 'P12345-2' and 'P12345-3' match 'P12345' of vectors; keep one",
        ),
    ],
)
def test_ids_that_match_several_or_hardly_any_are_refused(ids, known, options, message):
    with pytest.raises(DataError, match=message):
        match_ids(ids, known, "table", "vectors", **options)
