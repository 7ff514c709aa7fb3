"""Files of mutants: the wild type, tables to read, and tables of scores to write."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from esmeray.common.errors import DataError
from esmeray.common.text import counted
from esmeray.dataset.labels.values import number, text_of
from esmeray.dataset.section import IngestSection
from esmeray.dataset.store.conversion import job_store
from esmeray.dataset.table import Table
from esmeray.inference.mutations.section import MutantTableSection, MutationsSection
from esmeray.inference.mutations.variants import WILD_TYPE, Mutant, Protein


@dataclass(frozen=True)
class MutantTable:
    """Rows of a table.

    Attributes:
        column: of the texts.
        texts: as they stand there.
        mutants: None where there is none that can be scored.
        numbers: other columns, NaN where nothing stands.
        counts: rows that are unusual, by words for them.
    """

    column: str
    texts: list[str]
    mutants: list[Mutant | None]
    numbers: dict[str, NDArray[np.float64]]
    counts: Counter[str] = field(default_factory=Counter)

    def lines(self) -> list[str]:
        return [f"  {counted(count, words)}" for words, count in self.counts.items() if count]


def read_protein(section: MutationsSection, folder: Path) -> Protein:
    """The wild type; ``folder`` is for the work. Raises DataError for a file that is refused, or of more sequences."""
    # Read as every other input: cleaned, and refused by the same rules.
    store = job_store([str(section.sequence)], IngestSection(), folder)
    if len(store) != 1:
        raise DataError(f"{section.sequence}: holds {len(store):,} sequences; give the wild type alone")
    return Protein(store.sequence(0).tobytes().decode("ascii"), section.first_position)


def read_mutants(
    section: MutantTableSection, protein: Protein, command: str, numbers: Mapping[str, str]
) -> MutantTable:
    """The mutants of a table and, as numbers, columns by the setting that names each.

    Raises DataError for a table that can't be read, or the first row that is refused.
    """
    whole = section.sequence_column is not None
    column = section.sequence_column or section.mutant_column
    setting = f"{command}.{'sequence' if whole else 'mutant'}_column"
    columns = Table(section.table, {**numbers, column: setting}).columns()
    parse = protein.mutant_of if whole else protein.mutant
    table = MutantTable(column, [], [], {name: np.empty(len(columns[name])) for name in numbers})
    for row, value in enumerate(columns[column]):
        text = ""
        try:
            text = text_of(value).strip()
            mutant = parse(text.upper())  # lower case is soft masking, or a habit; it is counted
        except ValueError as error:
            if section.bad_mutants == "error":
                shown = "" if whole else f", {text!r}"
                raise DataError(
                    f"{section.table}, row {row + 1}{shown}: {error}; mend it or --{command}.first_position, or give "
                    f"--{command}.bad_mutants empty"
                ) from None
            mutant = None  # keeps its row, so that scores stand beside the table that they are of
        table.texts.append(text)
        table.mutants.append(mutant)
        table.counts["row{s} in lower case"] += text != text.upper()
    for name in numbers:
        table.numbers[name][:] = _numbers(section.table, name, columns[name])
    # By mutants, not by texts: A1C:D2E and D2E:A1C are one.
    used = Counter(mutant for mutant in table.mutants if mutant is not None)
    table.counts["row{s} without a score"] = table.mutants.count(None)
    table.counts["row{s} of the wild type, synonyms included"] = used[WILD_TYPE]
    table.counts["duplicate{s}, computed once"] = sum(used.values()) - len(used)
    return table


def _numbers(path: Path, column: str, values: Any) -> list[float]:
    numbers = []
    for row, value in enumerate(values, 1):
        try:
            numbers.append(number(value))
            # NaN is a missing value; an infinite one would be the top of every ranking.
            if math.isinf(numbers[-1]):
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
