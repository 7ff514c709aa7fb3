"""Propose the mutants to measure next, by a model that esmeray mutations fit made.

Candidates are all single mutants and combinations of mutations that were measured, or rows of the fit's tables without
a measured value. A plate is chosen for what is likely better than the best so far and, mutant by mutant, for what the
others of the plate would not show. Writes a CSV with the columns of the fit's table, the measured values empty: filled
in, it is one more table of the next fit. The report counts the mutants that were not candidates, by the reason.

Examples:
  esmeray mutations propose fitted --propose.output plate6.csv
  esmeray mutations propose fitted --propose.output plate6.csv --propose.exclude_positions 70 130-134 \
--propose.exclude_residues CM --propose.mutations 3
"""

from pathlib import Path
from typing import Annotated

from pydantic import Field

from esmeray.common.errors import ConfigError
from esmeray.common.text import counted
from esmeray.inference.mutations.section import MutationProposeSection
from esmeray.run_folder.job import unfinished
from esmeray.tools.grammar import Made, command

OfFittedModel = Annotated[Path, Field(description="A folder that esmeray mutations fit made.")]


@command("mutations propose", __doc__, made_by="propose_mutations")
def main(model: OfFittedModel, propose: MutationProposeSection, made: Made) -> None:
    from esmeray.inference.mutations.table import write_scores  # here: it loads pandas

    made.refuse_file(propose.output)
    with unfinished(propose.output, f"mutations propose by {model}") as folder:
        from esmeray.inference.mutations.fitted import read_fitted  # here: they load torch
        from esmeray.inference.mutations.proposal import Proposer

        fitted = read_fitted(str(model))
        if fitted is None:
            raise ConfigError(f"model {model}: is no fitted one; esmeray mutations fit makes one")
        proposer = Proposer(fitted, propose, folder)
        columns = proposer.plate()
        with made.file(propose.output) as building:
            write_scores(building, propose.output.name, columns)
    number = counted(len(columns["predicted"]), "mutant{s}")
    print("\n".join([f"{propose.output}: {number} to measure", *proposer.lines()]))
