"""Generate sequences for backbone structures with a trained sequence diffusion model or with ProteinMPNN.

Writes designs.fasta, probabilities.tsv with the probabilities at each position, and for each structure a logo next to
the native sequence. The header of a design has

- score: log-likelihood per residue in nats; nearer 0 is better;
- recovery: share of native residues, including fixed residues;
- same_as: the earlier design that it equals, if any;
- novelty, with --generate.known: share of residues that differ from the nearest known sequence.

A high recovery is not designability: fold the sequences with a folding model and compare.

fix takes residue numbers of the structure's file, with insertion codes: 57, 52A, -2, 10-20; in a complex, A:57. '#13'
counts along the chain from 1. Fixed residues keep the structure's amino acid. They are listed in the header of each
design and in probabilities.tsv. A file of biases uses the same notation. tie A,B gives two chains of a complex the same
residues.

Examples:
  esmeray design generate runs/structdiff --generate.structures fold.pdb --generate.output designs
  esmeray design generate runs/structdiff --generate.structures fold.pdb --generate.number 8 \
--generate.known proteins.store --generate.output compared
  esmeray design generate proteinmpnn --generate.structures fold.pdb --generate.number 8 --generate.output designs
  esmeray design generate runs/structdiff --generate.structures fold.cif --generate.chains A \
--generate.fix 1-10,52A --generate.omit C --generate.output designs
  esmeray design generate runs/structdiff --generate.structures dimer.pdb \
--generate.chains complex --generate.tie A,B --generate.output designs
  esmeray design generate runs/structdiff --generate.length 80 --generate.temperature 1 --generate.number 10 \
--generate.output free
"""

from esmeray.common.publishing import NOTES
from esmeray.common.text import counted
from esmeray.inference.design.calls import MADE_BY, GenerateSection, design
from esmeray.tools.grammar import ModelPath, OutputWriter, command


@command("design generate", __doc__, made_by=MADE_BY)
def main(model: ModelPath, generate: GenerateSection, writer: OutputWriter) -> None:
    table = design(model, **dict(generate), overwrite=writer.overwrite)
    words = f"{counted(len(table), 'sequence{s}')} for {counted(table['structure'].nunique(), 'structure{s}')}"
    equal = (table["same_as"] != "").sum()
    if equal:
        words += f", {equal:,} of them duplicates (same_as in designs.fasta)"
    print("\n".join([f"{generate.output}: {words}", *(f"  {line}" for line in table.attrs[NOTES])]))
