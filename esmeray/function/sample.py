"""The embedded sample: an ontology, and proteins whose terms follow from motifs.

Out: ``terms.obo`` with 500 terms in three namespaces, ``train`` and ``test`` as FASTA and as TSV of protein and term.
Each term without children has a motif of twelve residues. A family (:mod:`esmeray.dataset.store.sample`) has a term in
each namespace. One member in three has an additional term, so that homology alone does not suffice. The test set has
every tenth family, and every tenth of the other proteins.

Only uniform random numbers are drawn, as in :mod:`esmeray.dataset.store.sample`, so that a seed always gives the same
sample.
"""

from itertools import chain, count
from pathlib import Path

import numpy as np

from esmeray.dataset.fasta.alphabet import AMINO_ACIDS
from esmeray.dataset.section import SampleSection
from esmeray.dataset.store.sample import sample_records

NAMESPACES = {"molecular_function": 170, "biological_process": 230, "cellular_component": 100}
_BRANCHING = 3
_MOTIF = 12
_EXTRA = 1 / 3


def write_sample(folder: Path, settings: SampleSection) -> None:
    """Write the files to an existing folder; the same settings give the same bytes."""
    random = np.random.Generator(np.random.PCG64(0))
    leaves = _write_ontology(folder / "terms.obo", random)
    motifs = {term: _motif(random) for term in chain(*leaves)}
    of_family = [[terms[_below(len(terms), random)] for terms in leaves] for _ in range(settings.families)]
    texts: dict[str, list[str]] = {name: [] for name in ("train.fasta", "train.tsv", "test.fasta", "test.tsv")}
    records = sample_records(settings.records, settings.families)
    for number, (record, sequence) in enumerate(records):
        family = int(record.removeprefix("family").split("_")[0])
        terms = list(of_family[family])  # a copy: the additional terms of a member are not the family's
        if random.random() < _EXTRA:
            others = leaves[_below(len(leaves), random)]
            terms.append(others[_below(len(others), random)])
        residues = _with_motifs(sequence, [motifs[term] for term in terms], random)
        # Whole families test prediction without homologs, single proteins prediction with them.
        split = "test" if family % 10 == 9 or number % 10 == 9 else "train"
        texts[f"{split}.fasta"].append(f">{record}\n{residues}")
        # Without repeats: the additional term may be one that the family already has.
        texts[f"{split}.tsv"] += [f"{record}\t{term}" for term in dict.fromkeys(terms)]
    for name, lines in texts.items():
        (folder / name).write_text("\n".join([*lines, ""]), encoding="utf-8")


def _write_ontology(path: Path, random: np.random.Generator) -> list[list[str]]:
    """Write the terms, and return those without children by namespace."""
    leaves = []
    lines = ["format-version: 1.2"]
    serial = count(1)  # ids run through all namespaces, as the Gene Ontology's do
    for namespace, size in NAMESPACES.items():
        parents = [_parents(term, random) for term in range(size)]
        names = [f"EX:{next(serial):07d}" for _ in range(size)]
        for term, name in enumerate(names):
            lines += ["", "[Term]", f"id: {name}", f"name: {namespace} {term}", f"namespace: {namespace}"]
            lines += [f"is_a: {names[parent]}" for parent in parents[term][:1]]
            lines += [f"relationship: part_of {names[parent]}" for parent in parents[term][1:]]
        with_children = set(chain(*parents))
        leaves.append([name for term, name in enumerate(names) if term not in with_children])
    path.write_text("\n".join([*lines, ""]), encoding="utf-8")
    return leaves


def _parents(term: int, random: np.random.Generator) -> list[int]:
    """Return the parents of a term: its parent in a tree and, for one term in five, any earlier term too."""
    if term == 0:
        return []
    above = (term - 1) // _BRANCHING
    other = _below(term, random)
    return [above, other] if random.random() < 0.2 and other != above else [above]


def _with_motifs(sequence: str, motifs: list[str], random: np.random.Generator) -> str:
    """Return the sequence with the motifs at positions that do not overlap; appended if it is too short."""
    # One stretch per motif: random positions in the whole sequence could overwrite another motif.
    room = len(sequence) // len(motifs) - _MOTIF
    if room <= 0:
        return sequence + "".join(motifs)
    starts = [number * (room + _MOTIF) + _below(room, random) for number in range(len(motifs))]
    for start, motif in zip(starts, motifs, strict=True):
        sequence = sequence[:start] + motif + sequence[start + _MOTIF :]
    return sequence


def _below(size: int, random: np.random.Generator) -> int:
    return int(random.random() * size)


def _motif(random: np.random.Generator) -> str:
    return "".join(AMINO_ACIDS[_below(len(AMINO_ACIDS), random)] for _ in range(_MOTIF))
