"""Embedded labelled samples: proteins by their location in the cell, and messages to a shop by their intent.

Proteins are sequences of :mod:`esmeray.dataset.store.sample` into which sorting signals are written, independent of the
family: so a family carries no information about the location. Signals are degraded by substitutions, some beyond
recognition. KDEL counts only at the end, and also occurs inside proteins of all locations.

A message is a request of its intent with words filled in. It may also have a remark unrelated to the intent, a
greeting, and a typing error. Some requests belong to two intents.

Only uniform random numbers are drawn, as in :mod:`esmeray.dataset.store.sample`.
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import yaml

from esmeray.dataset.fasta.alphabet import AMINO_ACIDS
from esmeray.dataset.store.sample import sample_records

_MAX_WORN = 0.5
_MISLEADING = 0.2
_HELIX_TURN = 3.6
_SEGMENT = 20
"""Length of a segment that spans a membrane, in residues."""


def located_records(records: int, families: int, seed: int = 0) -> Iterator[tuple[str, str]]:
    """Yield ids like ``nucleus_00034`` and sequences; the same seed gives the same records."""
    random = np.random.Generator(np.random.PCG64([seed, 0, 1]))
    for number, (_, sequence) in enumerate(sample_records(records, families, seed)):
        location = list(_SIGNALS)[int((random.random() > _CUMULATIVE).sum())]
        # Before the signals, which may overwrite it.
        if random.random() < _MISLEADING:
            sequence = _written(sequence, "KDEL", _inside(sequence, 4, random))
        for signal, start in _SIGNALS[location](sequence, random):
            sequence = _written(sequence, _worn(signal, random), start)
        yield f"{location}_{number:05d}", sequence


_Signals = list[tuple[str, int]]
"""Signals, each with its start."""


def _to_the_nucleus(sequence: str, random: np.random.Generator) -> _Signals:
    """A nuclear localisation signal like KKKRK of SV40 (Kalderon et al. 1984)."""
    signal = "P" + _drawn("KKR", 5, random)
    return [(signal, _inside(sequence, len(signal), random))]


def _into_the_membrane(sequence: str, random: np.random.Generator) -> _Signals:
    """Hydrophobic segments, one in each of several equal parts of the sequence."""
    # The number of segments that a membrane protein has, but few enough to leave loops between them.
    count = max(1, min(1 + int(6 * random.random()), len(sequence) // (2 * _SEGMENT)))
    stretch = len(sequence) // count
    return [
        (_drawn("LLLIIVVFAGMW", _SEGMENT, random), start + int((stretch - _SEGMENT) * random.random()))
        for start in range(1, len(sequence) - stretch + 2, stretch)
    ]


def _out_of_the_cell(sequence: str, random: np.random.Generator) -> _Signals:
    """A signal peptide: a positive start, a hydrophobic core, and AXA before the cut (von Heijne 1983)."""
    core = _drawn("LLLLAVIF", 8 + int(6 * random.random()), random)
    start = "M" + _drawn("KRNS", 2, random)
    cut = _drawn("GSTP", 2, random) + "A" + _drawn("LSTQ", 1, random) + "A"
    return [(start + core + cut, 0)]


def _kept_in_the_reticulum(sequence: str, random: np.random.Generator) -> _Signals:
    """A signal peptide at the start and KDEL at the end (Munro and Pelham 1987)."""
    return [*_out_of_the_cell(sequence, random), (_drawn("KKKHR", 1, random) + "DEL", len(sequence) - 4)]


def _into_the_mitochondrion(sequence: str, random: np.random.Generator) -> _Signals:
    """A helix at the start with arginines on one side and no acidic residues (von Heijne 1986)."""
    helix = "M"
    for position in range(16 + int(10 * random.random())):
        is_positive_side = math.cos(2 * math.pi * position / _HELIX_TURN) > 0.5
        helix += _drawn("RRK" if is_positive_side else "LASLAGSV", 1, random)
    return [(helix, 0)]


_SIGNALS: dict[str, Callable[[str, np.random.Generator], _Signals]] = {
    "cytoplasm": lambda _sequence, _random: [],
    "nucleus": _to_the_nucleus,
    "membrane": _into_the_membrane,
    "secreted": _out_of_the_cell,
    "mitochondrion": _into_the_mitochondrion,
    "endoplasmic_reticulum": _kept_in_the_reticulum,
}
_CUMULATIVE = np.cumsum([0.26, 0.20, 0.18, 0.14, 0.12])


def _worn(signal: str, random: np.random.Generator) -> str:
    """Return a signal with substitutions: usually few, at most half of it."""
    share = _MAX_WORN * random.random() ** 3
    # Draw a letter for every position, so that the stream does not depend on the number of substitutions.
    replaced = _drawn(AMINO_ACIDS, len(signal), random)
    worn = random.random(len(signal)) < share
    return "".join(new if change else old for old, new, change in zip(signal, replaced, worn, strict=True))


def _written(sequence: str, signal: str, start: int) -> str:
    return sequence[:start] + signal + sequence[start + len(signal) :]


def _inside(sequence: str, length: int, random: np.random.Generator) -> int:
    """Return the start of ``length`` residues that exclude the first and the last residue."""
    return 1 + int((len(sequence) - length - 1) * random.random())


def _drawn(letters: str, count: int, random: np.random.Generator) -> str:
    return "".join(letters[int(number * len(letters))] for number in random.random(count))


_MESSAGES = yaml.safe_load(Path(__file__).with_name("messages.yaml").read_text(encoding="utf-8"))
_REQUESTS: dict[str, list[str]] = _MESSAGES["requests"]
_WORDS: dict[str, list[str]] = _MESSAGES["words"]
_WORDS["request"] = [request for requests in _REQUESTS.values() for request in requests]
_BLANK = re.compile(r"\{(\w+)\}")


def message_records(records: int, seed: int = 0) -> Iterator[tuple[str, str]]:
    """Yield ids like ``track_order_00034`` and messages in lower case; the same seed gives the same records."""
    random = np.random.Generator(np.random.PCG64([seed, 0, 2]))
    intents = tuple(_REQUESTS)
    for number in range(records):
        intent = intents[number % len(intents)]  # in a fixed cycle, so that all classes have the same size
        yield f"{intent}_{number:05d}", _message(intent, random)


def _message(intent: str, random: np.random.Generator) -> str:
    parts = [_filled(_choice(_REQUESTS[intent], random), random)]
    if random.random() < 0.6:
        parts.insert(int(2 * random.random()), _filled("{remark}", random))
    text = ". ".join(parts)
    if random.random() < 0.3:
        text = _filled("{greeting}, ", random) + text
    if random.random() < 0.3:
        text += _filled(" {close}", random)
    if random.random() < 0.3:
        missing = int(len(text) * random.random())
        text = text[:missing] + text[missing + 1 :]
    return text


def _filled(text: str, random: np.random.Generator) -> str:
    # Repeated, because a word may have blanks of its own.
    while blank := _BLANK.search(text):
        text = text[: blank.start()] + _choice(_WORDS[blank[1]], random) + text[blank.end() :]
    return text


def _choice(choices: Sequence[str], random: np.random.Generator) -> str:
    return choices[int(random.random() * len(choices))]
