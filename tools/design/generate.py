"""Generate sequences for backbone structures, by a trained sequence diffusion.

For each structure: sequences as FASTA, with their log-likelihood per residue (nats; nearer 0 is better), their recovery
of the native residues, fixed ones included, and, with --known, the share of residues in which they differ from the
nearest known sequence; probabilities of each position as a table; and a logo beside the native sequence. A high
recovery is not designability: fold the sequences with a folding model and compare.

Positions of --fix and --tie count from 1, along the chain; in a complex, CHAIN:POSITION. Fixed ones keep the
structure's residue. --tie A,B gives two chains of a complex the same residues.

Examples:
  esmeray design generate runs/structdiff --structure fold.pdb --output designs --number 8
  esmeray design generate runs/structdiff --structure fold.pdb --number 8 --known proteins.store --output compared
  esmeray design generate runs/structdiff --structure fold.cif --chain A --fix 1-10,57 --omit C --output designs
  esmeray design generate runs/structdiff --structure dimer.pdb --chain complex --tie A,B --output designs
  esmeray design generate runs/structdiff --length 80 --temperature 1 --number 10 --output free
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import tyro
from pydantic import Field

from common.arguments import parse
from common.errors import ConfigError
from common.progress import record_bar
from common.publishing import made_folder, refuse_existing
from common.text import counted
from dataset.fasta.alphabet import AMINO_ACIDS
from dataset.store.reader import Store
from dataset.structures.store import Structure
from inference.design.request import DesignOptions, load_model, structures_of
from inference.models.source import exported_by

MADE_BY = "generate"
_RANGE = re.compile(r"(?:(?P<chain>\w+):)?(?P<first>\d+)(?:-(?P<last>\d+))?")


class Arguments(DesignOptions):
    """What to generate."""

    output: Path = Field(description="Folder to make.")
    length: int | None = Field(None, gt=0, le=5000, description="Residues, without a structure.")
    number: int = Field(1, gt=0, description="Sequences for each structure.")
    fix: str = Field("", description="Positions that keep the structure's residue, as 1-10,57.")
    omit: str = Field("", description="Amino acids that are not used, as CM.")
    tie: str = Field("", description="Chains of a complex that get the same residues, as A,B.")
    temperature: float = Field(0.1, ge=0, description="0: the likeliest residue; 1: as the model's probabilities say.")
    steps: int = Field(20, gt=0, le=1000, description="Steps of denoising.")
    guidance: float = Field(1.0, ge=0, description="Weight of the structure; above 1 it counts for more.")
    order: Literal["confidence", "random"] = Field("confidence", description="Positions that are decided first.")
    seed: int = Field(0, ge=0, description="Seed.")
    known: Path | None = Field(None, description="Store of sequences to compare with: adds novelty to each.")
    overwrite: Annotated[bool, tyro.conf.FlagCreatePairsOff] = Field(
        False, description="Replace the folder if this tool made it and nobody changed it since."
    )


def main(argv: list[str]) -> int:
    """Read, generate, write."""
    arguments = parse(Arguments, argv, "design generate", __doc__)
    if bool(arguments.structure) == (arguments.length is not None):
        raise ConfigError("give either --structure or --length")
    if arguments.length and (arguments.fix or arguments.tie):
        raise ConfigError("--fix and --tie are of a structure; leave them out with --length")
    wrong = sorted(set(arguments.omit) - set(AMINO_ACIDS))
    if wrong or set(arguments.omit) == set(AMINO_ACIDS):
        raise ConfigError(f"--omit {arguments.omit}: name amino acids by their letters, and leave one")
    refuse_existing(arguments.output, MADE_BY, arguments.overwrite)
    exported_by("diffusion", arguments.model)
    structures = (
        structures_of(arguments) if arguments.structure else [Structure.unknown("free", "X" * (arguments.length or 0))]
    )
    known = None if arguments.known is None else Store(arguments.known)
    places = [(fixed_positions(arguments.fix, each), tied_positions(arguments.tie, each)) for each in structures]
    model, label = load_model(arguments)

    from alignment.scoring import scoring
    from alignment.search import Search
    from inference.design.novelty import nearest
    from inference.design.report import draw_logo, write_probabilities
    from inference.design.sampling import Request, generate
    from inference.design.scoring import log_likelihoods, recovery

    searched = None if known is None else Search(known, scoring())
    total, done = len(structures) * arguments.number, 0
    works = total * (1 if known is None else 2)
    kept = {name: getattr(arguments, name) for name in ("temperature", "steps", "guidance", "order")}
    with made_folder(arguments.output, MADE_BY, arguments.overwrite) as folder, record_bar("generating") as bar:
        for number, (structure, (fixed, tied)) in enumerate(zip(structures, places, strict=True)):
            request = Request(structure, fixed, arguments.omit, tied, label, **kept)
            budget = {"seed": arguments.seed, "tokens": arguments.tokens}
            designs = []
            for design in generate(model, request, arguments.number, **budget):
                designs.append(design)
                done += 1
                bar(done / works, done)
            texts = [design.residues for design in designs]
            scores = log_likelihoods(model, structure, texts, label=label, tokens=arguments.tokens)
            with (folder / "designs.fasta").open("a", encoding="utf-8") as file:
                for design, score in zip(designs, scores.tolist(), strict=True):
                    values = {"score": f"{score:.3f}"}
                    if len(structure.chain_names) > 1:
                        lengths = np.bincount(structure.chains)
                        values["chains"] = ",".join(map("{}:{}".format, structure.chain_names, lengths))
                    if arguments.structure:
                        values["recovery"] = f"{recovery(design.residues, structure.residues):.3f}"
                    if searched is not None:
                        found = nearest(design.residues, searched)
                        done += 1
                        bar(done / works, done)
                        values |= {"novelty": f"{found.novelty:.3f}", "nearest": found.record}
                    written = " ".join(f"{name}={value}" for name, value in values.items())
                    file.write(f">{structure.id}_{design.seed + 1} {written}\n{design.residues}\n")
            write_probabilities(
                folder / "probabilities.tsv", structure.id, structure.residues, designs, header=number == 0
            )
            draw_logo(folder / f"{structure.id}.png", structure.id, structure.residues, designs)
    print(f"{arguments.output}: {counted(total, 'sequence{s}')} for {counted(len(structures), 'structure{s}')}")
    return 0


def fixed_positions(text: str, structure: Structure) -> tuple[int, ...]:
    """Places from 0 of the positions that --fix names. Raises ConfigError for those that are not there."""
    places: list[int] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise ConfigError(f"--fix {part}: write positions as 1-10,57, in a complex as A:1-10")
        members = _members(structure, match["chain"], f"--fix {part}")
        first, last = int(match["first"]), int(match["last"] or match["first"])
        if first > last:
            raise ConfigError(f"--fix {part}: write the lower position first")
        if not 1 <= first <= last <= len(members):
            raise ConfigError(f"--fix {part}: {structure.id} has positions 1 to {len(members)}")
        places += members[first - 1 : last].tolist()
    return tuple(sorted(set(places)))


def tied_positions(text: str, structure: Structure) -> tuple[tuple[int, ...], ...]:
    """Groups of places that --tie gives the same residue. Raises ConfigError for chains of different lengths."""
    if not text:
        return ()
    chains = [_members(structure, name.strip(), f"--tie {text}").tolist() for name in text.split(",")]
    if len(chains) < 2 or len({len(chain) for chain in chains}) > 1:
        raise ConfigError(f"--tie {text}: name two chains of a complex or more, of equal lengths")
    return tuple(zip(*chains, strict=True))


def _members(structure: Structure, chain: str | None, option: str) -> np.ndarray:
    """Places of a chain's residues; of the only chain where none is named."""
    names = structure.chain_names
    if chain is None and len(names) == 1:
        return np.arange(len(structure.residues))
    if chain not in names:
        raise ConfigError(f"{option}: name a chain of {structure.id}, of {', '.join(names)}, with --chain complex")
    return np.flatnonzero(structure.chains == names.index(chain))
