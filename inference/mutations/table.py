"""Files of mutants: the wild type, tables to read, and tables of scores to write."""

from collections import Counter
from collections.abc import Iterator, Mapping
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
from esmeray.dataset.table import Columns, Table, is_table_name
from esmeray.inference.mutations.section import MutantTableSection, MutationsSection
from esmeray.inference.mutations.variants import WILD_TYPE, Protein, Variant

PROTEIN_COLUMN = "protein"
"""Of the names of wild types, in tables of several."""
_SEQUENCE_COLUMN = "mutated_sequence"
"""Of whole mutants in ProteinGym's assays, by which the wild type is known."""


@dataclass(frozen=True)
class MutantTable:
    """Rows of a table, or of several.

    Attributes:
        column: of the texts.
        texts: as they stand there.
        variants: None where there is none that can be scored.
        numbers: other columns, NaN where nothing stands.
        proteins: names of the wild types, where they are several.
        counts: rows that are unusual, by words for them.
    """

    column: str
    texts: list[str]
    variants: list[Variant | None]
    numbers: dict[str, NDArray[np.float64]]
    proteins: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def lines(self) -> list[str]:
        return [f"  {counted(count, words)}" for words, count in self.counts.items() if count]

    def names(self) -> dict[str, list[str]]:
        """Columns that say which mutant a row is of."""
        return {**({PROTEIN_COLUMN: self.proteins} if self.proteins else {}), self.column: self.texts}


def read_proteins(section: MutationsSection, folder: Path) -> list[Protein]:
    """The wild types; ``folder`` is for the work. Raises DataError for a file that is refused."""
    if section.sequence is None:
        raise ConfigError("no wild type is given; name its FASTA file in the setting sequence")
    # Read as every other input: cleaned, and refused by the same rules.
    store = job_store([str(section.sequence)], IngestSection(), folder)
    return [Protein(store.text(row), section.first_position, store.id(row)) for row in range(len(store))]


def read_mutants(section: MutantTableSection, folder: Path, command: str, numbers: Mapping[str, str]) -> MutantTable:
    """The mutants of all tables and, as numbers, columns by the setting that names each; ``folder`` is for the work.

    Raises DataError for a table that can't be read, or the first row that is refused.
    """
    whole = section.sequence_column is not None
    column = section.sequence_column or section.mutant_column
    wanted = {**numbers, column: f"{command}.{'sequence' if whole else 'mutant'}_column"}
    table = MutantTable(column, [], [], {})
    values: dict[str, list[float]] = {name: [] for name in numbers}
    for path, columns, proteins in _tables(section, folder, wanted):
        for row, (protein, value) in enumerate(zip(proteins, columns[column], strict=True), 1):
            text = ""
            mutant = None
            try:
                text = text_of(value).strip()
                # Lower case is soft masking, or a habit; it is counted.
                mutant = protein.mutant_of(text.upper()) if whole else protein.mutant(text.upper())
            except ValueError as error:
                # One that is empty keeps its row, so that scores stand beside the table that they are of.
                if section.bad_mutants == "error":
                    shown = "" if whole else f", {text!r}"
                    raise DataError(
                        f"{path}, row {row}{shown}: {error}; mend it or --{command}.first_position, or give "
                        f"--{command}.bad_mutants empty"
                    ) from None
            table.texts.append(text)
            table.variants.append(None if mutant is None else Variant(protein, mutant))
            table.counts["row{s} in lower case"] += text != text.upper()
        table.proteins.extend(protein.name for protein in proteins if protein.name)
        for name in numbers:
            values[name] += _numbers(path, name, columns[name])
    table.numbers.update({name: np.array(column) for name, column in values.items()})
    # By mutants, not by texts: A1C:D2E and D2E:A1C are one.
    used = Counter(variant for variant in table.variants if variant is not None)
    wild_types = sum(count for variant, count in used.items() if variant.mutant == WILD_TYPE)
    table.counts.update(
        {
            "row{s} without a score": table.variants.count(None),
            "row{s} of the wild type, synonyms included": wild_types,
            "duplicate{s}, computed once": sum(used.values()) - len(used),
        }
    )
    return table


def _tables(
    section: MutantTableSection, folder: Path, wanted: Mapping[str, str]
) -> Iterator[tuple[Path, Columns, list[Protein]]]:
    """Each table with its columns and the protein of each row: the only one of the FASTA file, which has no name then;
    that of the column ``protein``; or, of a table in a folder, that of the table's name."""
    of_gym = section.sequence is None and section.table.is_dir()
    proteins = [] if of_gym else read_proteins(section, folder)
    known = {protein.name: protein for protein in proteins}
    for path in [section.table, *section.more_tables]:
        if path.is_dir():
            for assay in sorted(filter(is_table_name, path.iterdir())):
                columns = Table(assay, wanted if known else {**wanted, _SEQUENCE_COLUMN: ""}).columns()
                name = assay.name.partition(".")[0]
                protein = _named(known, name, assay) if known else _wild_type(section, name, assay, columns)
                yield assay, columns, [protein] * len(next(iter(columns.values())))
        elif len(known) == 1:
            columns = Table(path, wanted).columns()
            yield path, columns, [replace(proteins[0], name="")] * len(next(iter(columns.values())))
        else:
            columns = Table(path, {**wanted, PROTEIN_COLUMN: ""}).columns()
            names = [text_of(value).strip() for value in columns[PROTEIN_COLUMN]]
            yield path, columns, [_named(known, name, f"{path}, row {row}") for row, name in enumerate(names, 1)]


def _named(known: Mapping[str, Protein], name: str, where: Path | str) -> Protein:
    if name not in known:
        hint = did_you_mean(name, known)
        raise DataError(f"{where}: no wild type is called {name!r}{hint}; give the FASTA file of all of them")
    return known[name]


def _wild_type(section: MutantTableSection, name: str, path: Path, columns: Columns) -> Protein:
    """The wild type of an assay of ProteinGym, from the whole sequence of the first mutant."""
    sequence = [*text_of(columns[_SEQUENCE_COLUMN][0])]
    try:
        for mutation in text_of(columns[section.mutant_column][0]).split(":"):
            sequence[int(mutation[1:-1]) - section.first_position] = mutation[0]
    except (KeyError, IndexError, ValueError) as error:
        raise DataError(f"{path}, row 1: has no whole sequence of its mutant ({error}); name the FASTA file") from None
    return Protein("".join(sequence), section.first_position, name)


def _numbers(path: Path, column: str, values: Any) -> list[float]:
    numbers = []
    for row, value in enumerate(values, 1):
        try:
            numbers.append(number(value))
            # NaN is a missing value; an infinite one would be the top of every ranking.
            if np.isinf(numbers[-1]):
                raise ValueError("is infinite")
        except ValueError as error:
            raise DataError(f"{path}, row {row}, column {column!r}: {error}; mend it, or leave it empty") from None
    return numbers


def write_scores(path: Path, final_name: str, columns: Mapping[str, Any]) -> None:
    """Write columns in the format that the suffix of ``final_name`` means; NaN is an empty value."""
    table = pd.DataFrame(dict(columns))
    if final_name.endswith(".parquet"):
        table.to_parquet(path, index=False)
    else:
        table.to_csv(path, sep="\t" if final_name.endswith(".tsv") else ",", index=False)
