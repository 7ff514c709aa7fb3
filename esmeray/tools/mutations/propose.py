"""Propose the mutants to measure next, with a model made by esmeray mutations fit.

Candidates are all single mutants and combinations of measured mutations, or rows of the fit's tables without a measured
value. A plate is chosen one mutant at a time: each is likely better than the best so far, and adds information that the
other mutants of the plate do not give. Writes a CSV with the columns of the fit's table and empty measured values. Fill
them in to use it as another table of the next fit. The report counts excluded mutants by reason.

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
from esmeray.tools.grammar import OutputWriter, command

FittedModelPath = Annotated[Path, Field(description="A folder written by esmeray mutations fit.")]


@command("mutations propose", __doc__, made_by=PROPOSED_BY)
def main(model: FittedModelPath, propose: MutationProposeSection, writer: OutputWriter) -> None:
    plate = propose_mutants(model, **dict(propose), overwrite=writer.overwrite)
    print("\n".join([f"{propose.output}: {counted(len(plate), 'mutant{s}')} to measure", *plate.attrs[NOTES]]))
