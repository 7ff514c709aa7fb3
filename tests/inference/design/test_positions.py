"""Positions are the file's residue numbers, or indices with #; written positions can be read again."""

import json
import re
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from esmeray.common.errors import ConfigError
from esmeray.dataset.fasta.alphabet import AMINO_ACIDS
from esmeray.dataset.structures.store import Structure, packed_number
from esmeray.inference.design.positions import bias_of, fixed_positions, read_bias, tied_positions, written_positions

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
    structure = replace(numbered(chain, from_101), residues="ACDEACDF")
    assert tied_positions("A,B", structure, (0, 4, 3)) == ((0, 4), (1, 5), (2, 6), (3, 7))
    with pytest.raises(ConfigError, match="A:5,B:105 are tied, but fixed to different residues"):
        tied_positions("A,B", structure, (3, 7))


WRITERS = st.sampled_from([yaml.safe_dump, json.dumps, partial(json.dumps, indent="\t")])
LETTER_BIASES = st.dictionaries(st.sampled_from([*AMINO_ACIDS]), st.floats(-5, 5, width=32), max_size=5)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(everywhere=LETTER_BIASES, insertion=LETTER_BIASES, inverted=st.booleans(), written=WRITERS)
def test_biases_add_up_at_the_named_positions(everywhere, insertion, inverted, written, tmp_path):
    content = {**everywhere, "52A": insertion, "A:-2": {"W": 1}}
    content = dict(reversed(content.items())) if inverted else content
    path = tmp_path / "bias"
    path.write_text(written(content))
    bias = bias_of(read_bias(path), "C", AUTHORS)
    expected = np.array([everywhere.get(letter, 0) for letter in AMINO_ACIDS], np.float32)
    at_insertion = expected + [insertion.get(letter, 0) for letter in AMINO_ACIDS]
    at_first = expected + [float(letter == "W") for letter in AMINO_ACIDS]
    expected[1] = at_insertion[1] = at_first[1] = -np.inf  # C is omitted
    for row, values in ((5, at_insertion), (0, at_first), (3, expected)):
        assert bias[row] == pytest.approx(values, abs=1e-5)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"X": 1}', "X: give numbers for amino acids"),
        ('{"A": "much"}', "A: give numbers"),
        ('{"A": .inf}', "A: give numbers"),
        ('{"1-3": 2}', "1-3: give numbers"),
        ('{"1-3": {"Z": 2}}', "Z: give numbers"),
        ('{"900": {"A": 2}}', "--generate.bias 900: fold has residues"),
        ('{"fold": {"A": [[1, 2]]}}', "A: give numbers"),
        ('{"A": 1, "A": 2}', "A is set twice"),
        ("[1]", "contains no settings"),
    ],
)
def test_other_biases_are_refused_in_one_line(content, words, tmp_path):
    path = tmp_path / "bias.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=re.escape(words)):
        bias_of(read_bias(path), "", AUTHORS)
