"""Files of mutants: the wild type, tables to read, and tables of scores to write.

Rows of one mutant are replicates, however each is written: :meth:`MutantTable.distinct` merges them. A row whose mutant
has no score by its notation (a stop, a deletion) stays without one, and is counted by kind.

Shape legend: N mutants, R rows that have one.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from esmeray.common.errors import ConfigError, DataError
from esmeray.common.text import counted, did_you_mean
from esmeray.dataset.labels.values import number, text_of
from esmeray.dataset.section import IngestSection
from esmeray.dataset.store.conversion import job_store
from esmeray.dataset.table import MISSING, Columns, Table, is_missing, is_table_name
from esmeray.inference.mutations.section import MutantTableSection, MutationsSection
from esmeray.inference.mutations.variants import (
    WILD_TYPE,
    Protein,
    UnscoredError,
    Variant,
    read_changes,
    split_target,
)

PROTEIN_COLUMN = "protein"
"""Names of wild types, in tables of several."""
_SEQUENCE_COLUMN = "mutated_sequence"
"""Whole mutants in ProteinGym's assays, by which the wild type is known."""
_MUTANT_COLUMNS = ("mutant", "hgvs_pro", "variant", "mutation", "mutations", "mutants", "variants", "aa_substitutions")
"""Usual names of the column of mutants, in lower case; the first that a table has is read."""


@dataclass(frozen=True)
class DistinctMutants:
    """The mutants of a table, each once, in the order of their first rows.

    Attributes:
        rows: (N,) first row of each.
        numbers_of_rows: number of the mutant of each row of the table, -1 for a row without one.
        numbers: (N,) means of each column over the rows that have a value, NaN for a mutant without one.
        replicates: (N,) number of these rows.
        groups: names of the groups, none without a column of groups.
    """

    rows: NDArray[np.int64]
    variants: list[Variant]
    numbers_of_rows: NDArray[np.int64]
    numbers: pd.DataFrame
    replicates: pd.DataFrame
    groups: list[str]

    def by_row(self, values_N: NDArray[np.float64]) -> NDArray[np.float64]:
        """The value of each row's mutant, NaN for a row without one."""
        # The number -1 is the last value.
        return np.append(values_N, np.nan)[self.numbers_of_rows]


@dataclass(frozen=True)
class MutantTable:
    """Rows of a table, or of several.

    Attributes:
        column: name of the column of mutants.
        variants: None for a row without a mutant that can be scored.
        numbers: columns of numbers, NaN for missing ones.
        proteins: names of the wild types if there are several.
        groups: names of the groups if a column of groups was asked for.
        columns: every column as it is in the tables, if that was asked for; None for rows of tables without it.
        counts: the number of unusual rows, by a noun for them.
    """

    column: str
    variants: list[Variant | None]
    numbers: dict[str, NDArray[np.float64]]
    proteins: list[str] = field(default_factory=list)
    groups: list[str] = field(default_factory=list)
    columns: dict[str, list[Any]] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)

    def lines(self) -> list[str]:
        return [f"  {counted(count, words)}" for words, count in self.counts.items() if count]

    def distinct(self) -> DistinctMutants:
        """Merge the rows of each mutant. Raises DataError for a mutant of two groups."""
        numbers_of: dict[Variant, int] = {}
        owners = np.array([-1 if key is None else numbers_of.setdefault(key, len(numbers_of)) for key in self.variants])
        rows = np.flatnonzero(owners >= 0)
        numbers = pd.DataFrame(self.numbers, index=range(len(owners))).iloc[rows].groupby(owners[rows])
        groups: dict[int, str] = {}
        for row in rows if self.groups else ():
            first = groups.setdefault(owners[row], self.groups[row])
            if self.groups[row] != first:
                protein, mutant = self.variants[row]
                raise DataError(
                    f"{protein.text_of(mutant)} is of the groups {first!r} and {self.groups[row]!r}; give all its rows "
                    "one group"
                )
        return DistinctMutants(
            rows=rows[np.unique(owners[rows], return_index=True)[1]],
            variants=[*numbers_of],
            numbers_of_rows=owners,
            numbers=numbers.mean(),
            replicates=numbers.count(),
            groups=[*groups.values()],
        )


def read_proteins(section: MutationsSection, folder: Path) -> list[Protein]:
    """The wild types; ``folder`` is for the work. Raises DataError for a file that is refused."""
    if section.sequence is None:
        raise ConfigError("no wild type is given; name its FASTA file in the setting sequence")
    # Read as every other input: cleaned, and refused by the same rules.
    store = job_store([str(section.sequence)], IngestSection(), folder)
    return [Protein(store.text(row), section.first_position, store.id(row)) for row in range(len(store))]


def read_mutants(
    section: MutantTableSection,
    folder: Path,
    command: str,
    numbers: Mapping[str, str],
    groups: str | None = None,
    every_column: bool = False,
) -> MutantTable:
    """The mutants of all tables and, as numbers, columns by the setting that names each; ``folder`` is for the work.

    ``groups`` is a column of names. Raises DataError for a table that can't be read, the first row that is refused, and
    tables without a mutant that has a score.
    """
    counts: Counter[str] = Counter()
    paths = _table_paths(section, counts)
    column = section.sequence_column or section.mutant_column or _mutant_column(paths[0], counts)
    kind = "mutant" if section.sequence_column is None else "sequence"
    wanted = {**numbers, column: f"{command}.{kind}_column"}
    if groups is not None:
        wanted[groups] = f"{command}.groups"
    table = MutantTable(column, [], {}, counts=counts)
    values: dict[str, list[float]] = {name: [] for name in numbers}
    for path, columns, proteins in _tables(section, folder, paths, column, wanted, counts if every_column else None):
        texts = _texts(path, column, columns, section.not_missing)
        for name in numbers:
            values[name] += _numbers(path, name, columns[name])
        if groups is not None:
            table.groups.extend(_texts(path, groups, columns, section.not_missing))
        if every_column:
            _append(table.columns, {**columns, column: texts}, len(table.variants))
        table.proteins.extend(protein.name for protein in proteins if protein.name)
        table.variants.extend(_variants(section, command, path, texts, proteins, counts))
    table.numbers.update({name: np.array(column) for name, column in values.items()})
    # By mutants, not by texts: A1C:D2E and D2E:A1C are one.
    used = Counter(variant for variant in table.variants if variant is not None)
    wild_types = sum(count for variant, count in used.items() if variant.mutant == WILD_TYPE)
    counts["row{s} of the wild type, synonyms included"] = wild_types
    counts["duplicate{s}, computed once"] = sum(used.values()) - len(used)
    if not used:
        raise DataError(f"{section.table}: no row has a mutant with a score;{','.join(table.lines())}")
    return table


def _variants(
    section: MutantTableSection,
    command: str,
    path: Path,
    texts: Sequence[str],
    proteins: Sequence[Protein],
    counts: Counter[str],
) -> list[Variant | None]:
    """The mutant of each row, None for one that is counted. Raises DataError for the first row that is refused."""
    whole = section.sequence_column is not None
    targets = {split_target(text)[0] for text in texts} - {""}
    if len(targets) > len(set(proteins)):
        shown = " and ".join(sorted(targets)[:3])
        raise DataError(f"{path}: has mutants of {shown}; name the protein of each row in a column {PROTEIN_COLUMN!r}")

    def hint_of(protein: Protein) -> str:
        own = [text for owner, text in zip(proteins, texts, strict=True) if owner == protein]
        return protein.hint(own, f"--{command}.first_position")

    variants: list[Variant | None] = []
    unlike: set[Protein] = set()
    for row, (protein, text) in enumerate(zip(proteins, texts, strict=True), 1):
        try:
            mutant = protein.mutant_of(text) if whole else protein.mutant(text)
        except ValueError as error:
            kind = error.kind if isinstance(error, UnscoredError) else ""
            if not kind and section.bad_mutants == "error":
                shown = "" if whole else f", {text!r}"
                remedy = f"or give --{command}.bad_mutants empty"
                hint = hint_of(protein) or f"correct it or --{command}.first_position"
                raise DataError(f"{path}, row {row}{shown}: {error}; {hint}, {remedy}") from None
            if not kind:
                unlike.add(protein)
                kind = "not of the wild type" if text else "missing"
            counts["row{s} without a score"] += 1
            counts[f"row{{s}} without a score: {kind}"] += 1
            variants.append(None)
            continue
        # Lower case is soft masking, or a habit; that of p.Ala24Gly is neither.
        is_lower = text != text.upper() if whole else text.islower() and mutant != WILD_TYPE
        counts["row{s} in lower case"] += is_lower
        variants.append(Variant(protein, mutant))
    for protein in unlike:
        if hint := hint_of(protein):
            counts[f"row{{s}} of {path}: {hint}"] = proteins.count(protein)
    return variants


def _table_paths(section: MutantTableSection, counts: Counter[str]) -> list[tuple[Path, str]]:
    """Each table, and the name of its protein if it is one of a folder. Raises DataError for a folder without any."""
    paths: list[tuple[Path, str]] = []
    sequence = None if section.sequence is None else section.sequence.resolve()
    for path in [section.table, *section.more_tables]:
        if not path.is_dir():
            paths.append((path, ""))
            continue
        assays: dict[str, Path] = {}
        files = sorted(file for file in path.iterdir() if file.is_file() and file.resolve() != sequence)
        for file in filter(is_table_name, files):
            other = assays.setdefault(file.name.partition(".")[0], file)
            if other != file:
                raise DataError(f"{file}: is of the same protein as {other}, by its name; rename one of them")
        if not assays:
            raise DataError(f"{path}: holds no table; give CSV, TSV or Parquet files")
        paths += [(file, name) for name, file in assays.items()]
        ignored = [file.name for file in files if not is_table_name(file)]
        counts[f"file{{s}} of {path} ignored, no table: {', '.join(ignored)}"] = len(ignored)
    return paths


def _mutant_column(table: tuple[Path, str], counts: Counter[str]) -> str:
    """The column of mutants by its usual names. Counted if it has another than the first of these."""
    header = {name.lower(): name for name in reversed(_header(table[0]))}
    column = next((header[name] for name in _MUTANT_COLUMNS if name in header), _MUTANT_COLUMNS[0])
    counts[f"column{{s}} of mutants, by its name: {column}"] = int(column != _MUTANT_COLUMNS[0])
    return column


def _header(path: Path) -> list[str]:
    table = Table(path, {})
    next(table.parts())
    return table.header


def _tables(
    section: MutantTableSection,
    folder: Path,
    paths: Sequence[tuple[Path, str]],
    column: str,
    wanted: Mapping[str, str],
    counts: Counter[str] | None,
) -> Iterator[tuple[Path, Columns, list[Protein]]]:
    """Each table with its columns and the protein of each row: the only one of the FASTA file, which has no name then;
    that of the column ``protein``; or, of a table in a folder, that of the table's name.

    With ``counts`` all columns, but for those whose name repeats, which are counted.
    """
    of_gym = section.sequence is None and section.table.is_dir()
    proteins = [] if of_gym else read_proteins(section, folder)
    known = {protein.name: protein for protein in proteins}
    for path, name in paths:
        needed = dict(wanted)
        if name and of_gym:
            needed[_SEQUENCE_COLUMN] = ""
        elif not name and len(known) > 1:
            needed[PROTEIN_COLUMN] = ""
        header = [] if counts is None else _header(path)
        others = [name for name in header if header.count(name) == 1]
        if counts is not None:
            counts["column{s} left out, whose name repeats"] += len(header) - len(others)
        # What means a missing value is left as it is in columns that are only passed on.
        columns = Table(path, {**dict.fromkeys(others, ""), **needed}, MISSING).columns()
        size = len(columns[column])
        if name:
            if of_gym:
                _add_wild_type(known, section, column, name, path, columns)
            yield path, columns, [_named(known, name, path)] * size
        elif len(known) == 1:
            yield path, columns, [replace(proteins[0], name="")] * size
        else:
            names = _texts(path, PROTEIN_COLUMN, columns, section.not_missing)
            yield path, columns, [_named(known, name, f"{path}, row {row}") for row, name in enumerate(names, 1)]


def _named(known: Mapping[str, Protein], name: str, where: Path | str) -> Protein:
    if name not in known:
        hint = did_you_mean(name, known)
        raise DataError(f"{where}: no wild type is called {name!r}{hint}; give the FASTA file of all of them")
    return known[name]


def _add_wild_type(
    known: dict[str, Protein], section: MutantTableSection, column: str, name: str, path: Path, columns: Columns
) -> None:
    """Add the wild type of an assay of ProteinGym, from the whole sequence of the first mutant."""
    try:
        letters = [*text_of(columns[_SEQUENCE_COLUMN][0]).strip().upper()]
        for change in read_changes(text_of(columns[column][0])):
            ((wild, position),) = change.named
            offset = position - section.first_position
            if not wild or offset < 0 or letters[offset] != change.new:
                raise ValueError(f"position {position} of it has another residue")
            letters[offset] = wild
    except (IndexError, ValueError) as error:
        raise DataError(f"{path}, row 1: has no whole sequence of its mutant ({error}); name the FASTA file") from None
    protein = Protein("".join(letters), section.first_position, name)
    if known.setdefault(name, protein) != protein:
        raise DataError(f"{path}: its wild type is another than in the table before of this name; rename one of them")


def _texts(path: Path, column: str, columns: Columns, keep: Sequence[str]) -> list[str]:
    """A column of texts, empty where a value is missing, other than ``keep``."""
    texts = []
    for row, value in enumerate(columns[column], 1):
        try:
            text = text_of(value).strip()
        except ValueError as error:
            raise DataError(f"{path}, row {row}, column {column!r}: {error}") from None
        texts.append("" if is_missing(text, keep) else text)
    return texts


def _append(columns: dict[str, list[Any]], more: Columns, rows: int) -> None:
    """Append a table's columns to those of ``rows`` rows; what one side lacks is None."""
    size = len(next(iter(more.values())))
    for name in {**columns, **more}:
        columns.setdefault(name, [None] * rows).extend(more.get(name, [None] * size))


def _numbers(path: Path, column: str, values: Any) -> list[float]:
    numbers = []
    for row, value in enumerate(values, 1):
        try:
            numbers.append(number(None if isinstance(value, str) and is_missing(value) else value))
            # NaN is a missing value; an infinite one would be the top of every ranking.
            if np.isinf(numbers[-1]):
                raise ValueError("is infinite")
        except ValueError as error:
            raise DataError(f"{path}, row {row}, column {column!r}: {error}; correct it, or leave it empty") from None
    return numbers


def _series(values: Any) -> pd.Series:
    """A column as it was read: integers stay integers next to missing values. Texts if tables have different types."""
    if isinstance(values, np.ndarray):
        return pd.Series(values)
    if len({type(value) for value in values if value is not None}) > 1:
        values = [None if value is None else str(value) for value in values]
    return pd.Series(values, dtype=object)


def write_scores(path: Path, final_name: str, columns: Mapping[str, Any]) -> None:
    """Write columns in the format that the suffix of ``final_name`` means; NaN is an empty value."""
    table = pd.DataFrame({name: _series(values) for name, values in columns.items()})
    if final_name.endswith(".parquet"):
        table.to_parquet(path, index=False)
    else:
        table.to_csv(path, sep="\t" if final_name.endswith(".tsv") else ",", index=False)
