"""Positions of a structure in the user's notation: residue numbers of its file, or counted along the chain.

- ``57``, ``52A`` and ``-2`` are residue numbers with insertion codes.
- ``10-20``, ``-2-5`` and ``52-52B`` are ranges. They may include residues that the file lacks.
- ``#13`` and ``#1-10`` count the residues of the chain from 1.
- In a complex the chain comes first: ``A:52A``, ``B:#13``.
"""

import re
from pathlib import Path
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, TypeAdapter, ValidationError

from esmeray.common.errors import ConfigError
from esmeray.dataset.fasta.alphabet import AMINO_ACIDS
from esmeray.dataset.structures.store import Structure, packed_number, residue_label
from esmeray.train_config.loading import read_file

Biases = dict[str, dict[Annotated[str, Field(pattern=f"^[{AMINO_ACIDS}]$")], Annotated[float, Field(ge=-1e6, le=1e6)]]]
# Counted positions have no insertion codes.
_SPAN = re.compile(
    r"(?P<counted>#)?(?P<first>-?\d{1,9})(?P<first_code>(?(counted)|[A-Za-z]?))"
    r"(?:\s*-\s*(?(counted)#?)(?P<last>-?\d{1,9})(?P<last_code>(?(counted)|[A-Za-z]?)))?"
)


def fixed_positions(text: str, structure: Structure, name: str = "--generate.fix") -> tuple[tuple[int, ...], int]:
    """Return the indices of the named positions, and the number of positions in ranges that the structure lacks.

    Raises ConfigError for a residue that the structure lacks, or a range without any residue.
    """
    indices: set[int] = set()  # ranges may overlap
    absent = 0
    for item in filter(None, map(str.strip, text.split(","))):
        option = f"{name} {item}"
        *chain, span = item.split(":", 1)
        match = _SPAN.fullmatch(span.strip())
        if match is None:
            raise ConfigError(
                f"{option}: write residue numbers like 57, 52A, 10-20 or A:57, and positions in the sequence like '#13'"
            )
        members = _members(structure, option, *chain)
        numbers = 256 * np.arange(1, len(members) + 1) if match["counted"] else structure.packed_numbers[members]
        first = packed_number(int(match["first"]), match["first_code"])
        last = first if match["last"] is None else packed_number(int(match["last"]), match["last_code"])
        # Compare numbers, not positions in the file: the ends of a range may be missing, and insertions may lie inside.
        inside = np.flatnonzero((numbers >= first) & (numbers <= last))
        if not inside.size:
            shown = f"{written_positions(structure, members)}, or positions #1-{len(members)}"
            raise ConfigError(f"{option}: {structure.id} has residues {shown}")
        absent += last // 256 - first // 256 + 1 - len(set((numbers[inside] // 256).tolist()))
        indices.update(members[inside].tolist())
    return tuple(sorted(indices)), absent


def read_bias(path: Path) -> Biases:
    """Read biases of amino acids, for all positions or for some: ``{"C": -2, "10-20": {"K": 1.5}}``.

    Returns them by positions; ``""`` is all positions. Raises ConfigError if the file can't be read or has other
    content.
    """
    settings, lines = read_file(path)
    # Keys as written: to YAML, 52 and 1:20 are numbers.
    names = [key[0] for key in lines if len(key) == 1]
    if len(names) != len(settings) or "" in names:
        raise ConfigError(f"{path}: a name is empty, or two names are the same number to YAML; correct them")
    values = dict(zip(names, settings.values(), strict=True))
    everywhere = {name: value for name, value in values.items() if not isinstance(value, dict)}
    try:
        return TypeAdapter(Biases).validate_python(
            {"": everywhere} | {name: values[name] for name in values.keys() - everywhere}
        )
    except ValidationError as error:
        name = error.errors()[0]["loc"][1]
        raise ConfigError(
            f'{path}: {name}: give numbers for amino acids, or for positions, as in {{"C": -2, "10-20": {{"K": 1.5}}}}'
        ) from error


def bias_of(biases: Biases, omit: str, structure: Structure) -> NDArray[np.float32]:
    """Return the (L, 20) bias of each amino acid at each position; -inf for omitted ones.

    Raises ConfigError for positions that the structure lacks.
    """
    bias = np.zeros((len(structure.residues), len(AMINO_ACIDS)), np.float32)
    for positions, letters in biases.items():
        rows = list(fixed_positions(positions, structure, "--generate.bias")[0]) if positions else slice(None)
        for letter, number in letters.items():
            bias[rows, AMINO_ACIDS.index(letter)] += number
    bias[:, [AMINO_ACIDS.index(letter) for letter in omit]] = -np.inf
    return bias


def tied_positions(text: str, structure: Structure, fixed: tuple[int, ...] = ()) -> tuple[tuple[int, ...], ...]:
    """Groups of residue indices that get the same residue.

    Raises ConfigError if the chains lack different residues, or if ``fixed`` indices of a group differ in residue.
    """
    if not text:
        return ()
    names = dict.fromkeys(map(str.strip, text.split(",")))
    chains = [_members(structure, f"--generate.tie {text}", name) for name in names]
    # Chains of equal length may lack different residues. The numbers, relative to the first one, show which match.
    if len(chains) < 2 or len({tuple(np.diff(structure.packed_numbers[chain])) for chain in chains}) > 1:
        shown = " and ".join(written_positions(structure, chain) for chain in chains)
        raise ConfigError(
            f"--generate.tie {text}: name two or more chains of a complex with the same residues, not {shown}"
        )
    groups = tuple(zip(*(chain.tolist() for chain in chains), strict=True))
    is_fixed = set(fixed)
    for group in groups:
        fixed_of_group = tuple(index for index in group if index in is_fixed)
        if len({structure.residues[index] for index in fixed_of_group}) > 1:
            shown = written_positions(structure, fixed_of_group)
            raise ConfigError(f"--generate.tie {text}: {shown} are tied, but fixed to different residues")
    return groups


def written_positions(structure: Structure, indices: "NDArray[np.int64] | tuple[int, ...]") -> str:
    """Residue numbers of these ascending positions, in the notation of :func:`fixed_positions`: A:1-9,A:13."""
    numbers = structure.packed_numbers[list(indices)]
    # A range ends at the end of a chain and before missing residues, so it names only residues in the structure.
    is_next = (np.diff(indices) == 1) & (np.diff(structure.chains[list(indices)]) == 0)
    is_next &= (np.diff(numbers) > 0) & (np.diff(numbers // 256) <= 1)
    texts = []
    for run in np.split(np.array(indices), np.flatnonzero(~is_next) + 1):
        ends = dict.fromkeys(map(residue_label, structure.packed_numbers[run[[0, -1]]].tolist()))
        texts.append(f"{structure.chain_names[structure.chains[run[0]]]}:{'-'.join(ends)}".removeprefix(":"))
    return ",".join(texts)


def _members(structure: Structure, option: str, chain: str | None = None) -> NDArray[np.int64]:
    """Indices of a chain's residues. If no chain is named, the structure's only chain."""
    names = structure.chain_names
    if chain is None and len(names) == 1:
        return np.arange(len(structure.residues))
    if chain not in names:
        raise ConfigError(
            f"{option}: name a chain of {structure.id} ({', '.join(names)}), with --generate.chains complex"
        )
    return np.flatnonzero(structure.chains == names.index(chain))
