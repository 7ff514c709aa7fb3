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

from esmeray.common.publishing import NOTES
from esmeray.common.text import counted
from esmeray.inference.mutations.calls import PROPOSED_BY
from esmeray.inference.mutations.calls import propose as propose_mutants
from esmeray.inference.mutations.section import MutationProposeSection
from esmeray.tools.grammar import Made, command

OfFittedModel = Annotated[Path, Field(description="A folder that esmeray mutations fit made.")]


@command("mutations propose", __doc__, made_by=PROPOSED_BY)
def main(model: OfFittedModel, propose: MutationProposeSection, made: Made) -> None:
    plate = propose_mutants(model, **dict(propose), overwrite=made.overwrite)
    print("\n".join([f"{propose.output}: {counted(len(plate), 'mutant{s}')} to measure", *plate.attrs[NOTES]]))
