"""Files of mutants: the wild type, tables to read, and tables of scores to write.

Rows of one mutant are replicates, however each is written: :func:`distinct` finds them. A row whose mutant
has no score by its notation (a stop, a deletion) stays without one, and is counted by kind.

Shape legend: N mutants, R rows that have one.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from esmeray.common.errors import ConfigError, DataError
from esmeray.common.text import counted, did_you_mean
from esmeray.dataset.identifiers import match_ids
from esmeray.dataset.labels.values import finite, text_of
from esmeray.dataset.section import IngestSection
from esmeray.dataset.store.conversion import job_store
from esmeray.dataset.table import MISSING, Columns, Table, is_missing, is_table_name
from esmeray.inference.mutations.section import MutantTableSection, MutationsSection
from esmeray.inference.mutations.variants import WILD_TYPE, Protein, UnscoredError, Variant, read_changes

PROTEIN_COLUMN = "protein"
"""Names of wild types, in tables of several."""
_SEQUENCE_COLUMN = "mutated_sequence"
"""Column of whole mutants in ProteinGym's assays, from which the wild type is inferred."""
_MUTANT_COLUMNS = ("mutant", "hgvs_pro", "variant", "mutation", "mutations", "mutants", "variants", "aa_substitutions")
"""Usual names of the column of mutants, in lower case; the first that a table has is read."""

_SUFFIX = re.compile(r"\.(csv|tsv|parquet)(\.\w+)?$", re.IGNORECASE)
Value = TypeVar("Value")


@dataclass(frozen=True)
class MutantTable:
    """The mutants of a table, or of several, each once and in the order of its first row.

    Attributes:
        column: name of the column of mutants.
        rows: the columns that were read, a row for each of the table: numbers with NaN for missing ones, others as they
            are in the file.
        number_of_row: number of each row's mutant, -1 for a row without one that can be scored.
        numbers: (N,) means of columns of numbers over the rows that have a value, NaN for a mutant without one.
        replicates: (N,) number of these rows.
        groups: (N,) names of each mutant's groups; none without a column of groups.
        counts: the number of unusual rows, by a noun for them.
    """

    column: str
    rows: pd.DataFrame
    variants: list[Variant]
    number_of_row: NDArray[np.int64]
    numbers: dict[str, NDArray[np.float64]]
    replicates: dict[str, NDArray[np.int64]]
    groups: list[NDArray]
    counts: Counter[str]

    def lines(self) -> list[str]:
        return [f"  {counted(count, words)}" for words, count in self.counts.items() if count]


def distinct(
    variants: Sequence[Variant | None], where: Path | str, counts: Counter[str]
) -> tuple[list[Variant], NDArray[np.int64]]:
    """Each mutant once, in the order of its first row, and the number of each row's, -1 for a row without one.

    ``where`` and ``counts`` are for the message. Raises DataError if no row has a mutant.
    """
    number_of_row, mutants = pd.factorize(np.fromiter(variants, object, len(variants)))
    if not len(mutants):
        reasons = ", ".join(counted(count, words) for words, count in counts.items() if count)
        raise DataError(
            f"{where}: no mutant has a score ({reasons or 'there is none'}); give substitutions, such as A24G"
        )
    return mutants.tolist(), number_of_row


def by_row(values_N: NDArray[np.float64], number_of_row: NDArray[np.int64]) -> NDArray[np.float64]:
    """The value of each row's mutant, NaN for a row without one."""
    # The number -1 is the last value.
    return np.append(values_N, np.nan)[number_of_row]


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
    numbers: Mapping[str | None, str],
    groups: str | None = None,
    every_column: bool = False,
) -> MutantTable:
    """The mutants of all tables and, as numbers, columns by the option that names each, without the column None.

    ``folder`` is for the work, ``groups`` a column of names. Raises DataError for a table that can't be read, the first
    row that is refused, and tables without a mutant that has a score.
    """
    counts: Counter[str] = Counter()
    paths = _table_paths(section, counts)
    column = section.sequence_column or section.mutant_column or _mutant_column(paths[0][0], counts)
    kind = "mutant" if section.sequence_column is None else "sequence"
    settings = {**numbers, column: f"{command}.{kind}_column", groups: f"{command}.groups"}
    wanted = {name: setting for name, setting in settings.items() if name is not None}
    read_text = partial(_text, keep=section.not_missing)
    reads = {name: finite if name in numbers else read_text for name in wanted}
    variants: list[Variant | None] = []
    tables = []
    for path, columns, proteins in _tables(section, folder, paths, column, wanted, every_column):
        columns |= {name: _read(path, name, columns, read) for name, read in reads.items()}
        variants += read_variants(
            columns[column],
            proteins,
            path,
            counts,
            options=f"--{command}.",
            whole=section.sequence_column is not None,
            refuse=section.bad_mutants == "error",
        )
        # Objects, so that integers stay integers next to missing values.
        tables.append(pd.DataFrame(columns, dtype=object))
    rows = pd.concat(tables, ignore_index=True)
    # By mutants, not by texts: A1C:D2E and D2E:A1C are one.
    mutants, number_of_row = distinct(variants, section.table, counts)
    counts["row{s} of the wild type, synonyms included"] = sum(
        variant is not None and variant.mutant == WILD_TYPE for variant in variants
    )
    counts["duplicate{s}, computed once"] = len(variants) - variants.count(None) - len(mutants)
    merged = rows[number_of_row >= 0].groupby(number_of_row[number_of_row >= 0])
    return MutantTable(
        column=column,
        rows=rows,
        variants=mutants,
        number_of_row=number_of_row,
        numbers={name: merged[name].mean().to_numpy(float) for name in wanted if name in numbers},
        replicates={name: merged[name].count().to_numpy() for name in wanted if name in numbers},
        groups=[] if groups is None else merged[groups].unique().tolist(),
        counts=counts,
    )


def read_variants(
    texts: Sequence[str],
    proteins: Sequence[Protein],
    where: Path | str,
    counts: Counter[str],
    *,
    options: str = "",
    whole: bool = False,
    refuse: bool = True,
) -> list[Variant | None]:
    """The mutant of each row, from notations or ``whole`` sequences; None for one that is counted.

    ``where`` and ``options`` (the start of an option's name) are for messages. Raises DataError for the first row that
    is no mutant of its protein, if these are refused.
    """
    variants: list[Variant | None] = []

    @cache
    def hint_of(protein: Protein) -> str:
        own = [text for owner, text in zip(proteins, texts, strict=True) if owner == protein]
        return "" if whole else protein.hint(own, f"{options}first_position")

    for row, (protein, text) in enumerate(zip(proteins, texts, strict=True), 1):
        variants.append(None)
        try:
            mutant = protein.mutant_of(text) if whole else protein.mutant(text)
            variants[-1] = Variant(protein, mutant)
            # Lower case is soft masking, or a habit; in p.Ala24Gly it is neither.
            counts["row{s} in lower case"] += text != text.upper() if whole else text.islower() and mutant != WILD_TYPE
        except UnscoredError as error:
            counts[f"row{{s}} without a score: {str(error).removesuffix(' has no score')}"] += 1
        except ValueError as error:
            if refuse:
                shown = "" if whole else f", {text!r}"
                remedy = hint_of(protein) or ("correct it" if whole else f"correct it or {options}first_position")
                remedy += f", or give {options}bad_mutants empty" if options else ""
                raise DataError(f"{where}, row {row}{shown}: {error}; {remedy}") from None
            kind = hint_of(protein) or "no mutant of the wild type"
            counts[f"row{{s}} without a score: {kind if text else 'missing'}"] += 1
    counts["row{s} without a score"] += variants.count(None)
    return variants


def _table_paths(section: MutantTableSection, counts: Counter[str]) -> list[tuple[Path, str]]:
    """Each table, and the name of its protein if it is one of a folder. Raises DataError for a folder without any."""
    paths: list[tuple[Path, str]] = []
    for path in [section.table, *section.more_tables]:
        if not path.is_dir():
            paths.append((path, ""))
            continue
        files = sorted(file for file in path.iterdir() if file.is_file() and file != section.sequence)
        assays = [*filter(is_table_name, files)]
        if not assays:
            raise DataError(f"{path}: holds no table; give a CSV, TSV or Parquet file for each protein")
        paths += [(assay, _SUFFIX.sub("", assay.name)) for assay in assays]
        ignored = [file.name for file in files if file not in assays]
        counts[f"file{{s}} of {path} ignored: {', '.join(ignored)}"] = len(ignored)
    return paths


def _mutant_column(path: Path, counts: Counter[str]) -> str:
    """The column of mutants by its usual names. Counted if it has another than the first of these."""
    header = {name.lower(): name for name in reversed(_header(path))}
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
    every_column: bool,
) -> Iterator[tuple[Path, Columns, list[Protein]]]:
    """Each table with its columns and the protein of each row: the FASTA file's only one, which then has no name; the
    one that the column ``protein`` names; or, for a table in a folder, the one named like the table. Tables of several
    proteins have a column of their names."""
    of_gym = section.sequence is None and section.table.is_dir()
    proteins = [] if of_gym else read_proteins(section, folder)
    if len(proteins) == 1 and not any(name for _, name in paths):
        proteins = [replace(proteins[0], name="")]
    known = {protein.name: protein for protein in proteins}
    for path, name in paths:
        by_column = not name and "" not in known
        needed = [PROTEIN_COLUMN] * by_column + [_SEQUENCE_COLUMN] * (of_gym and not by_column)
        header = _header(path) if every_column else []
        # Without trailing separators, which make several columns without a name.
        others = [other for other in header if other or header.count(other) == 1]
        # Columns that are only passed on keep their texts for missing values.
        columns = Table(path, {**dict.fromkeys([*others, *needed], ""), **wanted}, MISSING).columns()
        names = [name] * len(columns[column])
        if by_column:
            names = _read(path, PROTEIN_COLUMN, columns, partial(_text, keep=section.not_missing))
        elif name:
            columns = {PROTEIN_COLUMN: names, **columns}
        if _SEQUENCE_COLUMN in needed:
            protein = _gym_wild_type(path, Protein("", section.first_position, name), columns, column)
            if known.setdefault(name, protein) != protein:
                raise DataError(f"{path}: its wild type is another than in the table before of this name; rename one")
        matches = match_ids(names, known, path, section.sequence, share=0)
        for row, unknown in enumerate(names, 1):
            if unknown not in matches:
                problem = f"no wild type is called {unknown!r}{did_you_mean(unknown, known)}"
                raise DataError(f"{path}, row {row}: {problem}; give the FASTA file of all of them")
        yield path, columns, [known[matches[own]] for own in names]


def _gym_wild_type(path: Path, unknown: Protein, columns: Columns, column: str) -> Protein:
    """The wild type of an assay of ProteinGym, from the whole sequence of the first mutant of substitutions."""
    problem = "no row has a mutant of substitutions and its whole sequence"
    for text, whole in zip(columns[column], columns[_SEQUENCE_COLUMN], strict=True):
        mutated = replace(unknown, sequence=text_of(whole).strip().upper())
        try:
            changes = [(change.named, change.new) for change in read_changes(text_of(text))]
            # The mutant is the wild type of the mutations back.
            back = ":".join(f"{new}{position}{wild}" for ((wild, position),), new in changes)
            return replace(mutated, sequence=mutated.mutant(back or "WT").sequence(mutated.sequence))
        except ValueError as error:
            problem = str(error)
    raise DataError(f"{path}: {problem}; name the FASTA file of the wild type")


def _read(path: Path, column: str, columns: Columns, read: Callable[[Any], Value]) -> list[Value]:
    """A column's values. Raises DataError for the first that is refused."""
    values = []
    for row, value in enumerate(columns[column], 1):
        try:
            values.append(read(value))
        except ValueError as error:
            raise DataError(f"{path}, row {row}, column {column!r}: {error}; correct it, or leave it empty") from None
    return values


def _text(value: Any, keep: Sequence[str] = ()) -> str:
    """A text, empty for a missing value other than ``keep``."""
    text = text_of(value).strip()
    return "" if is_missing(text, keep) else text


def write_scores(path: Path, final_name: str, columns: Any) -> None:
    """Write columns in the format that the suffix of ``final_name`` means; NaN is an empty value."""
    table = pd.DataFrame(columns)
    if final_name.endswith(".parquet"):
        table.to_parquet(path, index=False)
    else:
        table.to_csv(path, sep="\t" if final_name.endswith(".tsv") else ",", index=False)
