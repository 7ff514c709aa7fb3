"""Score sequences on backbone structures with a trained sequence diffusion model or with ProteinMPNN.

Each sequence of the FASTA file is scored on each structure of the same length: mean log-likelihood per residue in nats
(nearer 0 is better), and the share of native residues. The table keeps the order of the file. ProteinMPNN averages over
4 random orders of residues, which are the same in each run.

Examples:
  esmeray design score proteinmpnn --score.structures fold.pdb --score.sequences designs.fasta \
--score.output scores.tsv
  esmeray design score runs/structdiff --score.structures fold.pdb --score.sequences designs.fasta \
--score.output scores.tsv
"""

import sys
from pathlib import Path

from pydantic import Field

from esmeray.common.errors import ConfigError, DataError
from esmeray.common.progress import record_bar
from esmeray.common.text import counted
from esmeray.dataset.structures.conversion import read_proteins
from esmeray.inference.design.calls import DesignStructuresSection, exported_design, load_model, structures_of
from esmeray.tools.grammar import ModelPath, OutputWriter, command


class ScoreSection(DesignStructuresSection):
    """Structures, sequences to score on them, and settings of the model."""

    sequences: list[str] = Field(min_length=1)
    """FASTA files, folders or globs."""
    output: Path
    """TSV file to write the scores to."""


@command("design score", __doc__, made_by="score_design")
def main(model: ModelPath, score: ScoreSection, writer: OutputWriter) -> None:
    writer.refuse_file(score.output)
    exported_design(model)
    if not score.structures:
        raise ConfigError("--score.structures: give the files of the structures to score on")
    structures = structures_of(score)
    records = list(zip(*read_proteins(score.sequences), strict=True))
    # A file often has designs of several structures: score each sequence on structures of its length.
    fitting = [[record for record in records if len(record[1]) == len(item.residues)] for item in structures]
    if not any(fitting):
        lengths = ", ".join(f"{item.id} {len(item.residues)}" for item in structures[:3])
        raise DataError(f"no sequence is as long as a structure ({lengths} residues)")
    designer, label = load_model(model, score)

    from esmeray.inference.design.sampling import log_likelihoods, recovery, weights_notes

    rows = 0
    with (
        writer.file(score.output) as building,
        building.open("w", encoding="utf-8") as file,
        record_bar("scoring") as bar,
    ):
        file.write("structure\tsequence\tlog_likelihood\trecovery\n")
        for number, (structure, sequences) in enumerate(zip(structures, fitting, strict=True), 1):
            values = log_likelihoods(
                designer, structure, [text for _, text in sequences], label=label, tokens=score.tokens
            )
            for (name, text), value in zip(sequences, values, strict=True):
                file.write(f"{structure.id}\t{name}\t{value:.4f}\t{recovery(text, structure.residues):.4f}\n")
            rows += len(sequences)
            bar(number / len(structures), rows)
    wanted = {len(structure.residues) for structure in structures}
    # Count a sequence if it has the length of no structure at all.
    left_out = sum(len(text) not in wanted for _, text in records)
    if left_out:
        print(f"{counted(left_out, 'sequence{s}')} left out because no structure has that length", file=sys.stderr)
    words = f"{counted(rows, 'score{s}')} on {counted(len(structures), 'structure{s}')}"
    print("\n  ".join([f"{score.output}: {words}", *weights_notes(designer)]))
