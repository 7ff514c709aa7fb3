"""Positions of a structure as people write them: by the residue numbers of its file, or counted along the chain.

``57``, ``52A`` and ``-2`` are residue numbers with insertion codes. ``10-20``, ``-2-5`` and ``52-52B`` are ranges of
them, which may span residues that the file lacks. ``#13`` and ``#1-10`` count the residues of the chain from 1. The
chain of a complex comes first: ``A:52A``, ``B:#13``.
"""

import re

import numpy as np
from numpy.typing import NDArray

from esmeray.common.errors import ConfigError
from esmeray.dataset.structures.store import Structure

_NUMBER = r"(-?\d+)([A-Za-z]?)"
_SPAN = re.compile(rf"(?P<counted>#?){_NUMBER}(?:-#?{_NUMBER})?")


def fixed_positions(text: str, structure: Structure) -> tuple[tuple[int, ...], int]:
    """Indices of the positions that fix names, and the number of those within its ranges that the structure lacks.

    Raises ConfigError for a residue that is not there, or a range without any.
    """
    indices: set[int] = set()  # ranges may overlap
    absent = 0
    for item in filter(None, map(str.strip, text.split(","))):
        option = f"--generate.fix {item}"
        chain, colon, span = item.rpartition(":")
        members = _members(structure, chain if colon else None, option)
        match = _SPAN.fullmatch(span)
        if match is None:
            raise ConfigError(f"{option}: write residue numbers as 57, 52A, 10-20 or A:57, and positions as '#13'")
        numbers = 256 * np.arange(1, len(members) + 1) if match["counted"] else structure.packed_numbers[members]
        _, first_number, first_code, last_number, last_code = match.groups()
        first = 256 * int(first_number) + ord(first_code or "\0")
        last = first if last_number is None else 256 * int(last_number) + ord(last_code or "\0")
        if last < first:
            raise ConfigError(f"{option}: write the lower number first")
        # By numbers and not by order: ends of a range may be missing, and loops of another protein be inserted.
        inside = np.flatnonzero((numbers >= first) & (numbers <= last))
        if not inside.size:
            shown = f"{written_positions(structure, members)}, or #1-{len(members)} in order"
            raise ConfigError(f"{option}: {structure.id} has residues {shown}")
        absent += last // 256 - first // 256 + 1 - len(set((numbers[inside] // 256).tolist()))
        indices.update(members[inside].tolist())
    return tuple(sorted(indices)), absent


def tied_positions(text: str, structure: Structure) -> tuple[tuple[int, ...], ...]:
    """Groups of residues, by index, that become the same. Raises ConfigError if chains lack different residues."""
    if not text:
        return ()
    option = f"--generate.tie {text}"
    chains = [_members(structure, name.strip(), option) for name in text.split(",")]
    if len(chains) < 2 or len({len(chain) for chain in chains}) > 1:
        raise ConfigError(f"{option}: name two chains of a complex or more, of equal lengths")
    # Of equal length, chains may lack different residues: the numbers, from any first one, say which belong together.
    steps = [np.diff(structure.packed_numbers[chain]) for chain in chains]
    for chain, other in zip(chains, steps, strict=True):
        if not np.array_equal(other, steps[0]):
            raise ConfigError(
                f"{option}: the chains lack different residues: {written_positions(structure, chains[0])} and "
                f"{written_positions(structure, chain)}; give a structure in which they have the same"
            )
    return tuple(zip(*(chain.tolist() for chain in chains), strict=True))


def written_positions(structure: Structure, indices: "NDArray[np.int64] | tuple[int, ...]") -> str:
    """Residue numbers of these positions, ascending, as :func:`fixed_positions` reads them: A:1-9,A:13."""
    labels = structure.residue_labels
    numbers = structure.packed_numbers
    runs: list[list[int]] = []
    for index in map(int, indices):
        before = runs[-1][-1] if runs else -2
        is_next = before == index - 1 and structure.chains[before] == structure.chains[index]
        # A range ends where residues are missing, so that a reader sees what is there.
        if is_next and numbers[before] < numbers[index] and numbers[index] // 256 <= numbers[before] // 256 + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    texts = []
    for run in runs:
        chain = structure.chain_names[structure.chains[run[0]]]
        span = "-".join(labels[index] for index in dict.fromkeys((run[0], run[-1])))
        texts.append(f"{chain}:{span}" if chain else span)
    return ",".join(texts)


def _members(structure: Structure, chain: str | None, option: str) -> NDArray[np.int64]:
    """Indices of a chain's residues; of the only chain if none is named."""
    names = structure.chain_names
    if chain is None and len(names) == 1:
        return np.arange(len(structure.residues))
    if chain not in names:
        raise ConfigError(
            f"{option}: name a chain of {structure.id}, of {', '.join(names)}, with --generate.chains complex"
        )
    return np.flatnonzero(structure.chains == names.index(chain))
