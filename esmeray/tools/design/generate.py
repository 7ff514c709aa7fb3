"""Generate sequences for backbone structures with a trained sequence diffusion model.

Writes designs.fasta, probabilities.tsv with the probabilities at each position, and for each structure a logo next to
the native sequence. The header of a design has

- score: log-likelihood per residue in nats; nearer 0 is better;
- recovery: share of native residues, including fixed residues;
- same_as: the earlier design that it equals, if any;
- novelty, with --generate.known: share of residues that differ from the nearest known sequence.

A high recovery is not designability: fold the sequences with a folding model and compare.

fix takes residue numbers of the structure's file, with insertion codes: 57, 52A, -2, 10-20; in a complex, A:57. '#13'
counts along the chain from 1. Fixed residues keep the structure's amino acid. They are listed in the header of each
design and in probabilities.tsv. tie A,B gives two chains of a complex the same residues.

Examples:
  esmeray design generate runs/structdiff --generate.structures fold.pdb --generate.output designs
  esmeray design generate runs/structdiff --generate.structures fold.pdb --generate.number 8 \
--generate.known proteins.store --generate.output compared
  esmeray design generate runs/structdiff --generate.structures fold.cif --generate.chains A \
--generate.fix 1-10,52A --generate.omit C --generate.output designs
  esmeray design generate runs/structdiff --generate.structures dimer.pdb \
--generate.chains complex --generate.tie A,B --generate.output designs
  esmeray design generate runs/structdiff --generate.length 80 --generate.temperature 1 --generate.number 10 \
--generate.output free
"""

from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from esmeray.common.errors import ConfigError
from esmeray.common.progress import record_bar
from esmeray.common.text import counted
from esmeray.dataset.fasta.alphabet import AMINO_ACIDS
from esmeray.dataset.store.reader import Store
from esmeray.dataset.structures.store import Structure
from esmeray.inference.design.positions import fixed_positions, tied_positions, written_positions
from esmeray.inference.design.request import DesignStructuresSection, exported_design, load_model, structures_of
from esmeray.tools.grammar import Made, OfModel, command
from esmeray.train_config.section import NonNegativeFloat, NonNegativeInt, PositiveInt


class GenerateSection(DesignStructuresSection):
    """Structures, designs to generate for them, and settings of the model."""

    output: Path
    """Folder to write the results to."""
    length: Annotated[int, Field(gt=0, le=5000)] | None = None
    """Number of residues of a design without a structure."""
    number: PositiveInt = 1
    """Number of sequences per structure."""
    fix: str = ""
    """Residues that keep the structure's amino acid, by the numbers of its file, e.g. 1-10,52A; '#13' counts from 1."""
    omit: str = ""
    """Amino acids that designs must not contain, e.g. CM."""
    tie: str = ""
    """Chains of a complex that get the same residues, e.g. A,B."""
    temperature: NonNegativeFloat = 0.1
    """Sampling temperature. 0: the likeliest residue; 1: the model's probabilities."""
    steps: Annotated[int, Field(gt=0, le=1000)] = 20
    """Number of denoising steps per sequence."""
    guidance: NonNegativeFloat = 1.0
    """Weight of the structure; above 1 it has more influence than in training."""
    order: Literal["confidence", "random"] = "confidence"
    """Order in which positions are decided: the most confident first, or random."""
    seed: NonNegativeInt = 0
    """Seed of the random draws."""
    known: Path | None = None
    """Store of known sequences; adds the novelty of each design."""


def _check_settings(generate: GenerateSection) -> None:
    # The length of a design for a structure is the structure's.
    if bool(generate.structures) == (generate.length is not None):
        raise ConfigError("give either --generate.structures or --generate.length")
    if generate.length and (generate.fix or generate.tie):
        raise ConfigError("--generate.fix and --generate.tie are of a structure; leave them out with --generate.length")
    if not set(generate.omit) < set(AMINO_ACIDS):
        raise ConfigError(f"--generate.omit {generate.omit}: name amino acids by their letters, and leave one")


@command("design generate", __doc__, made_by="generate")
def main(model: OfModel, generate: GenerateSection, made: Made) -> None:
    _check_settings(generate)
    made.refuse_existing(generate.output)
    exported_design(model)
    # Without a structure, all residues lack coordinates. The model was trained for this case, too.
    structures = [Structure.unknown("free", "X" * generate.length)] if generate.length else structures_of(generate)
    known = None if generate.known is None else Store(generate.known)
    # Check all structures before the model is loaded: the last one may lack a fixed residue.
    fixed_residues = [fixed_positions(generate.fix, item) for item in structures]
    tied_residues = [tied_positions(generate.tie, item) for item in structures]
    diffusion, label = load_model(model, generate)

    from esmeray.alignment.scoring import scoring
    from esmeray.alignment.search import Search
    from esmeray.inference.design import sampling
    from esmeray.inference.design.report import draw_logo, write_probabilities

    search = None if known is None else Search(known, scoring())
    total, done = len(structures) * generate.number, 0
    distinct = 0
    options = {name: getattr(generate, name) for name in ("temperature", "steps", "guidance", "order")}
    with made.folder(generate.output) as folder, record_bar("generating") as bar:
        for structure, (fixed, _), tied in zip(structures, fixed_residues, tied_residues, strict=True):
            request = sampling.Request(structure, fixed, generate.omit, tied, label, **options)
            designs = []
            for design in sampling.generate(
                diffusion, request, generate.number, seed=generate.seed, tokens=generate.tokens
            ):
                designs.append(design)
                done += 1
                bar(done / total, done)
            texts = [design.residues for design in designs]
            distinct += len(set(texts))
            scores = sampling.log_likelihoods(diffusion, structure, texts, label=label, tokens=generate.tokens)
            sizes = np.bincount(structure.chains)
            chains = ",".join(f"{name}:{size}" for name, size in zip(structure.chain_names, sizes, strict=True))
            # Append after each structure, so that finished designs take no memory.
            with (folder / "designs.fasta").open("a", encoding="utf-8") as file:
                for design, score in zip(designs, scores.tolist(), strict=True):
                    # At a low temperature the likeliest sequence is drawn repeatedly.
                    first = designs[texts.index(design.residues)]
                    recovery = sampling.recovery(design.residues, structure.residues)
                    values = {
                        "score": f"{score:.3f}",
                        "same_as": "" if first is design else f"{structure.id}_{first.seed + 1}",
                        "chains": chains if "," in chains else "",
                        "fixed": written_positions(structure, fixed) if fixed else "",
                        # Without a structure there is no native residue to recover.
                        "recovery": f"{recovery:.3f}" if generate.structures else "",
                    }
                    if search is not None:
                        record, novelty = sampling.nearest(design.residues, search)
                        values |= {"novelty": f"{novelty:.3f}", "nearest": record}
                    written = " ".join(f"{name}={value}" for name, value in values.items() if value)
                    file.write(f">{structure.id}_{design.seed + 1} {written}\n{design.residues}\n")
            write_probabilities(folder / "probabilities.tsv", structure, fixed, designs)
            draw_logo(folder / f"{structure.id}.png", structure, designs)
    equal = f", {total - distinct:,} of them equal to an earlier one (same_as in designs.fasta)"
    words = f"{counted(total, 'sequence{s}')} for {counted(len(structures), 'structure{s}')}"
    print(f"{generate.output}: {words}{equal if distinct < total else ''}")
    if generate.fix:
        positions, absent = zip(*fixed_residues, strict=True)
        print(f"  {counted(sum(map(len, positions)), 'residue{s}')} fixed")
        if any(absent):
            print(f"  {counted(sum(absent), 'number{s}')} within the ranges without a residue in the structures")
