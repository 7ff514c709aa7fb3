"""Read wild types and tables of mutants, and write tables of scores.

Rows with the same mutant are replicates, in any notation: :func:`distinct` finds them. A row whose mutant has no score
by its notation (a stop, a deletion) stays without one and is counted by kind.

Shape legend: N mutants, R rows with a mutant.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from esmeray.common.errors import ConfigError, DataError, did_you_mean
from esmeray.common.text import counted
from esmeray.dataset.identifiers import match_ids
from esmeray.dataset.labels.values import finite, read_values, text_of
from esmeray.dataset.section import IngestSection
from esmeray.dataset.sequence_list import clean_list
from esmeray.dataset.store.conversion import job_store
from esmeray.dataset.table import MISSING, Columns, Table, is_missing, is_table_name
from esmeray.inference.mutations.section import MutantTableSection
from esmeray.inference.mutations.variants import WILD_TYPE, Protein, UnscoredError, Variant, read_changes

PROTEIN_COLUMN = "protein"
"""Column of wild type names in tables with several proteins."""
_SEQUENCE_COLUMN = "mutated_sequence"
"""Column of whole mutant sequences in ProteinGym's assays. The wild type is inferred from it."""
_MUTANT_COLUMNS = ("mutant", "hgvs_pro", "variant", "mutation", "mutations", "mutants", "variants", "aa_substitutions")
"""Usual names of the mutant column, in lower case. The first that a table has is read."""

_SUFFIX = re.compile(r"\.(csv|tsv|parquet)(\.\w+)?$", re.IGNORECASE)


@dataclass(frozen=True)
class MutantTable:
    """Distinct mutants of one or more tables, in the order of their first rows.

    Attributes:
        column: name of the mutant column.
        rows: the columns that were read, one row per table row: numbers with NaN if missing, others as in the file.
        number_of_row: mutant number of each row; -1 for a row without a mutant that can be scored.
        numbers: (N,) means of numeric columns over the rows with a value; NaN for a mutant without one.
        replicates: (N,) number of rows with a value.
        groups: (N,) group names of each mutant; empty without a group column.
        counts: number of unusual rows, by a noun for them.
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
    """Return the distinct mutants in the order of their first rows, and the mutant number of each row; -1 for none.

    ``where`` and ``counts`` are for the message. Raises DataError if no row has a mutant.
    """
    number_of_row, mutants = pd.factorize(np.fromiter(variants, object, len(variants)))
    if not len(mutants):
        reasons = ", ".join(counted(count, words) for words, count in counts.items() if count)
        raise DataError(
            f"{where}: no mutant can be scored ({reasons or 'the table has none'}); give substitutions, such as A24G"
        )
    return mutants.tolist(), number_of_row


def by_row(values_N: NDArray[np.float64], number_of_row: NDArray[np.int64]) -> NDArray[np.float64]:
    """Value of each row's mutant; NaN for a row without one."""
    # Number -1 selects the appended NaN.
    return np.append(values_N, np.nan)[number_of_row]


def read_proteins(sequence: str | Path | None, first_position: int, folder: Path) -> list[Protein]:
    """Read the wild types of a FASTA file, or a single one that is a text; ``folder`` is for the work.

    Raises DataError for an invalid file or sequence.
    """
    if sequence is None:
        raise ConfigError("the wild type is missing; set sequence to its FASTA file")
    # Both are read like any other input, with the same cleaning and checks.
    if isinstance(sequence, str):
        return [Protein(clean_list([sequence], "sequence")[0], first_position, "sequence")]
    store = job_store([str(sequence)], IngestSection(), folder)
    return [Protein(store.text(row), first_position, store.id(row)) for row in range(len(store))]


def read_mutants(
    section: MutantTableSection,
    sequence: str | Path | None,
    folder: Path,
    command: str,
    numbers: Mapping[str | None, str],
    groups: str | None = None,
    every_column: bool = False,
) -> MutantTable:
    """Read the mutants of all tables.

    Args:
        sequence: wild type as a text, or FASTA file.
        folder: folder for the work.
        numbers: numeric columns with the option that names each; the column None is ignored.
        groups: column of group names.
        every_column: also keep the other columns.

    Raises DataError for a table that can't be read, for the first invalid row, and for tables without a mutant that has
    a score.
    """
    counts: Counter[str] = Counter()
    paths = _table_paths(section, counts)
    column = section.sequence_column or section.mutant_column or _mutant_column(paths[0][0], counts)
    kind = "mutant" if section.sequence_column is None else "sequence"
    settings = {**numbers, column: f"{command}.{kind}_column", groups: f"{command}.groups"}
    wanted = {name: setting for name, setting in settings.items() if name is not None}
    read_text = partial(_text, keep=section.not_missing)
    variants: list[Variant | None] = []
    tables = []
    for path, columns, proteins in _tables(section, sequence, folder, paths, column, wanted, every_column):
        columns |= {
            name: read_values(path, name, columns[name], finite if name in numbers else read_text) for name in wanted
        }
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
    # Compared as mutants instead of texts: A1C:D2E and D2E:A1C are the same.
    mutants, number_of_row = distinct(variants, section.source, counts)
    counts["row{s} of the wild type (including synonymous mutations)"] = sum(
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
    """Parse the mutant of each row, from notations or ``whole`` sequences; None for a row that is counted instead.

    ``where`` and ``options`` (the start of an option's name) are for messages. If ``refuse``, raises DataError for the
    first row that is not a mutant of its protein.
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
            # Lower case is usually soft masking or a habit; mixed case such as p.Ala24Gly is not counted.
            counts["row{s} in lower case"] += text != text.upper() if whole else text.islower() and mutant != WILD_TYPE
        except UnscoredError as error:
            counts[f"row{{s}} without a score: {str(error).removesuffix(' has no score')}"] += 1
        except ValueError as error:
            if refuse:
                shown = "" if whole else f", {text!r}"
                remedy = hint_of(protein) or ("correct it" if whole else f"correct it, or set {options}first_position")
                remedy += f", or give {options}bad_mutants empty" if options else ""
                raise DataError(f"{where}, row {row}{shown}: {error}; {remedy}") from None
            kind = hint_of(protein) or "not a mutant of the wild type"
            counts[f"row{{s}} without a score: {kind if text else 'missing'}"] += 1
    counts["row{s} without a score"] += variants.count(None)
    return variants


def _table_paths(section: MutantTableSection, counts: Counter[str]) -> list[tuple[Path, str]]:
    """Paths of the tables; a table in a folder has its protein's name. Raises DataError for a folder without tables."""
    paths: list[tuple[Path, str]] = []
    for path in section.table:
        if not path.is_dir():
            paths.append((path, ""))
            continue
        files = sorted(file for file in path.iterdir() if file.is_file() and file != section.sequence)
        assays = [*filter(is_table_name, files)]
        if not assays:
            raise DataError(f"{path}: contains no table; give a CSV, TSV or Parquet file per protein")
        paths += [(assay, _SUFFIX.sub("", assay.name)) for assay in assays]
        ignored = [file.name for file in files if file not in assays]
        counts[f"file{{s}} of {path} ignored: {', '.join(ignored)}"] = len(ignored)
    return paths


def _mutant_column(path: Path, counts: Counter[str]) -> str:
    """Find the mutant column by its usual names. Counted if it is not the first of these names."""
    header = {name.lower(): name for name in reversed(_header(path))}
    column = next((header[name] for name in _MUTANT_COLUMNS if name in header), _MUTANT_COLUMNS[0])
    counts[f"column{{s}} of mutants, detected by name: {column}"] = int(column != _MUTANT_COLUMNS[0])
    return column


def _header(path: Path) -> list[str]:
    table = Table(path, {})
    next(table.parts())
    return table.header


def _tables(
    section: MutantTableSection,
    sequence: str | Path | None,
    folder: Path,
    paths: Sequence[tuple[Path, str]],
    column: str,
    wanted: Mapping[str, str],
    every_column: bool,
) -> Iterator[tuple[Path, Columns, list[Protein]]]:
    """Yield each table with its columns and the protein of each row.

    The protein is one of:

    - the FASTA file's only wild type, which then has no name
    - the wild type named in the column ``protein``
    - for a table in a folder, the wild type with the table's name

    Tables of several proteins get a column of names.
    """
    is_proteingym = sequence is None and all(name for _, name in paths)
    proteins = [] if is_proteingym else read_proteins(sequence, section.first_position, folder)
    if len(proteins) == 1 and not any(name for _, name in paths):
        proteins = [replace(proteins[0], name="")]
    known = {protein.name: protein for protein in proteins}
    for path, name in paths:
        by_column = not name and "" not in known
        needed = [PROTEIN_COLUMN] * by_column + [_SEQUENCE_COLUMN] * (is_proteingym and not by_column)
        header = _header(path) if every_column else []
        # Columns without a name are dropped if there are several, as trailing separators create.
        others = [other for other in header if other or header.count(other) == 1]
        # Columns that are only passed on keep their texts for missing values.
        columns = Table(path, {**dict.fromkeys([*others, *needed], ""), **wanted}, MISSING).columns()
        names = [name] * len(columns[column])
        if by_column:
            names = read_values(path, PROTEIN_COLUMN, columns[PROTEIN_COLUMN], partial(_text, keep=section.not_missing))
        elif name:
            columns = {PROTEIN_COLUMN: names, **columns}
        if _SEQUENCE_COLUMN in needed:
            protein = _gym_wild_type(path, Protein("", section.first_position, name), columns, column)
            if known.setdefault(name, protein) != protein:
                raise DataError(f"{path}: its wild type differs from an earlier table with the same name; rename one")
        matches = match_ids(names, known, path, sequence, share=0)
        for row, unknown in enumerate(names, 1):
            if unknown not in matches:
                problem = f"no wild type is named {unknown!r}{did_you_mean(unknown, known)}"
                raise DataError(f"{path}, row {row}: {problem}; give a FASTA file with all wild types")
        yield path, columns, [known[matches[own]] for own in names]


def _gym_wild_type(path: Path, unknown: Protein, columns: Columns, column: str) -> Protein:
    """Infer the wild type of a ProteinGym assay from the whole sequence of the first mutant with substitutions."""
    problem = "no row has both a mutant with only substitutions and its full sequence"
    for text, whole in zip(columns[column], columns[_SEQUENCE_COLUMN], strict=True):
        mutated = replace(unknown, sequence=text_of(whole).strip().upper())
        try:
            changes = [(change.named, change.new) for change in read_changes(text_of(text))]
            # Apply the reverse mutations to the mutant.
            back = ":".join(f"{new}{position}{wild}" for ((wild, position),), new in changes)
            return replace(mutated, sequence=mutated.mutant(back or "WT").sequence(mutated.sequence))
        except ValueError as error:
            problem = str(error)
    raise DataError(f"{path}: {problem}; give the FASTA file of the wild type")


def _text(value: Any, keep: Sequence[str] = ()) -> str:
    """Text of a value; empty if it is missing, unless ``keep`` contains it."""
    text = text_of(value).strip()
    return "" if is_missing(text, keep) else text


def write_scores(path: Path, final_name: str, table: pd.DataFrame) -> None:
    """Write a table in the format of the suffix of ``final_name``; NaN is an empty value."""
    if final_name.endswith(".parquet"):
        table.to_parquet(path, index=False)
    else:
        table.to_csv(path, sep="\t" if final_name.endswith(".tsv") else ",", index=False)
