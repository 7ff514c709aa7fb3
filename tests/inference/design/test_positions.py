"""Positions are the file's residue numbers, or indices with #; written positions can be read again."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from esmeray.common.errors import ConfigError
from esmeray.dataset.structures.store import Structure, packed_number
from esmeray.inference.design.positions import fixed_positions, tied_positions, written_positions

LABELS = st.tuples(st.integers(-60, 60), st.sampled_from(["", "", "A", "B"]))


def numbered(*chains: list[tuple[int, str]], names: str = "AB") -> Structure:
    labels = [label for chain in chains for label in chain]
    structure = Structure.unknown("fold", "A" * len(labels))
    return replace(
        structure,
        chains=np.repeat(np.arange(len(chains), dtype=np.int8), list(map(len, chains))),
        chain_names=tuple(names[: len(chains)]),
        numbers=np.array([packed_number(*label) for label in labels], dtype=np.int32),
    )


AUTHORS = numbered([(number, "") for number in (-2, -1, 0, 1)] + [(52, ""), (52, "A"), (52, "B"), (53, ""), (60, "")])


@pytest.mark.parametrize(
    ("text", "labels", "absent"),
    [
        ("52A", "52A", 0),
        ("A:52A", "52A", 0),
        ("-2", "-2", 0),
        ("-2-5", "-2 -1 0 1", 4),
        ("-2--1, 53", "-2 -1 53", 0),
        ("-2 - 1", "-2 -1 0 1", 0),
        ("52-52B", "52 52A 52B", 0),
        ("52-53", "52 52A 52B 53", 0),
        ("A:50-52", "52", 2),
        ("#5", "52", 0),
        ("A:#5", "52", 0),
        ("#1-2,#2-#3", "-2 -1 0", 0),
        ("", "", 0),
    ],
)
def test_numbers_are_those_of_the_file_and_counted_ones_have_a_sign(text: str, labels: str, absent: int):
    indices, number = fixed_positions(text, AUTHORS)
    assert ([AUTHORS.residue_labels[index] for index in indices], number) == (labels.split(), absent)


REFUSED = [
    "5",
    "16",
    "53A",
    "2-40",
    "#10",
    "#0",
    "B:1",
    ":1",
    "a",
    "1-",
    "52B-52",
    "#5A",
    "5#",
    "1:2:3",
    "1-#5",
    "#1-2A",
    "A:1-A:5",
]


@pytest.mark.parametrize("text", REFUSED)
def test_what_is_not_there_is_refused_with_what_is(text: str):
    with pytest.raises(ConfigError, match=f"--generate.fix {text}: ") as refused:
        fixed_positions(text, AUTHORS)
    if text in ("5", "16"):
        assert "fold has residues A:-2-1,A:52-53,A:60, or positions #1-9" in str(refused.value)


@settings(deadline=None)
@given(st.lists(LABELS, min_size=1, unique=True), st.lists(LABELS, min_size=1, unique=True), st.data())
def test_what_is_written_is_read_as_the_same_positions(first, second, data):
    structure = numbered(sorted(first), sorted(second))
    indices = tuple(sorted(data.draw(st.sets(st.integers(0, len(first) + len(second) - 1), min_size=1))))
    assert fixed_positions(written_positions(structure, indices), structure)[0] == indices
    by_number = ",".join(f"{'AB'[structure.chains[i]]}:{structure.residue_labels[i]}" for i in indices)
    assert fixed_positions(by_number, structure) == (indices, 0)
    counted = ",".join(f"B:#{i + 1 - len(first)}" if i >= len(first) else f"A:#{i + 1}" for i in indices)
    assert fixed_positions(counted, structure) == (indices, 0)


def test_chains_are_tied_by_their_numbers():
    chain = [(number, "") for number in (1, 2, 4, 5)]
    from_101 = [(number + 100, "") for number, _ in chain]
    assert tied_positions("A,B", numbered(chain, from_101)) == ((0, 4), (1, 5), (2, 6), (3, 7))
    with pytest.raises(ConfigError, match="name two or more chains"):
        tied_positions("A,A", numbered(chain, from_101))
    with pytest.raises(ConfigError, match="with the same residues, not A:1-2,A:4-5 and B:1-4"):
        tied_positions("A,B", numbered(chain, [(number, "") for number in (1, 2, 3, 4)]))
