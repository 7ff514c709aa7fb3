"""Settings of design by sequence diffusion, and ``esmeray design generate`` as a function of Python.

Designs are written structure by structure. Mistakes are reported before torch is loaded: the last structure may lack a
residue that is to be fixed.
"""

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Unpack

from pydantic import Field

from esmeray.common.errors import ConfigError
from esmeray.common.progress import record_bar
from esmeray.common.publishing import NOTES, made_folder, output_or_scratch, refuse_existing
from esmeray.common.text import counted
from esmeray.dataset.fasta.alphabet import AMINO_ACIDS
from esmeray.dataset.section import CaOnly, StructuresSection
from esmeray.dataset.sequence_list import checked_paths
from esmeray.dataset.store.reader import Store
from esmeray.dataset.structures.conversion import check_ids, find_structure_files, read_files
from esmeray.dataset.structures.store import Structure, StructureCounts
from esmeray.inference.design.positions import fixed_positions, tied_positions
from esmeray.inference.models.source import exported_by
from esmeray.train_config.section import DEFAULT_TOKENS, NonNegativeFloat, NonNegativeInt, PositiveInt, Section

if TYPE_CHECKING:
    import pandas as pd

    from esmeray.inference.settings import DesignSettings
    from esmeray.tasks.diffusion.model import SequenceDiffusion

MADE_BY = "generate"
TASK = "diffusion"


class DesignModelSection(Section):
    """Settings to run a sequence diffusion model."""

    label: str | None = None
    """Class to condition designs on."""
    device: str | None = None
    """Device to compute on: cpu or cuda. Default: CUDA if available."""
    tokens: PositiveInt = DEFAULT_TOKENS
    """Token budget of a batch."""


class DesignStructuresSection(DesignModelSection):
    """Settings for structures and the model."""

    structures: list[str] = Field(default=[])
    """Structure files, folders or globs."""
    chains: str = "each"
    """Chains to read from each file: each, first, complex (all as one), or names, e.g. A,B."""
    ca_only: CaOnly = "error"
    """Handling of chains with CA atoms only: error, skip or complete."""


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
        raise ConfigError(
            "--generate.fix and --generate.tie need a structure; remove them, or remove --generate.length"
        )
    if not set(generate.omit) < set(AMINO_ACIDS):
        raise ConfigError(f"--generate.omit {generate.omit}: give amino acids as letters, and leave at least one")


def design(
    model: str | Path,
    structures: str | Path | Sequence[str | Path] = (),
    *,
    output: str | Path | None = None,
    overwrite: bool = False,
    **settings: "Unpack[DesignSettings]",
) -> "pd.DataFrame":
    """Generate sequences for backbone structures, as ``esmeray design generate``.

    Args:
        model: folder of a run of sequence diffusion, or of an export of one.
        structures: structure file, folder or glob, or a list of them; none with ``length``.
        output: folder to write designs.fasta, probabilities.tsv and the logos to; by default nothing is written.
        overwrite: replace an output that design made.
        settings: others of the command, such as ``number``, ``chains``, ``fix``, ``omit``, ``temperature`` and
            ``known``.

    Returns a row for each sequence: ``id``, ``structure``, ``sequence``, ``score`` (log-likelihood per residue in nats)
    and what else is in the header of its record in designs.fasta: ``same_as``, ``chains``, ``fixed`` and ``recovery``,
    and with ``known`` also ``novelty`` and ``nearest``. ``attrs["notes"]`` counts the fixed residues. Raises
    EsmerayError for what the command refuses.

    >>> designs = esmeray.design("diffusion", "fold.pdb", number=2, steps=2, fix="1-3")
    >>> designs["id"].tolist(), designs["sequence"].str.len().tolist(), designs.attrs["notes"]
    (['fold_A_1', 'fold_A_2'], [107, 107], ['3 residues fixed'])
    """
    with output_or_scratch(output) as target:
        section = GenerateSection.of(structures=checked_paths(structures, "structures"), output=target, **settings)
        _check_settings(section)
        refuse_existing(section.output, MADE_BY, overwrite)
        exported_design(model)
        # Without a structure, all residues lack coordinates. The model was trained for this case, too.
        items = [Structure.unknown("free", "X" * section.length)] if section.length else structures_of(section)
        known = None if section.known is None else Store(section.known)
        fixed = [fixed_positions(section.fix, item) for item in items]
        tied = [tied_positions(section.tie, item) for item in items]
        diffusion, label = load_model(model, section)
        from esmeray.alignment.scoring import scoring  # here: they load parasail, torch and Matplotlib
        from esmeray.alignment.search import Search
        from esmeray.inference.design.report import design_table, pd, write_designs
        from esmeray.inference.design.sampling import Request, generate

        sampling = section.model_dump(include={"temperature", "steps", "guidance", "order"})
        requests = [
            Request(item, positions, section.omit, groups, label, **sampling)
            for item, (positions, _), groups in zip(items, fixed, tied, strict=True)
        ]
        search = None if known is None else Search(known, scoring())
        tables: list[pd.DataFrame] = []
        made = nullcontext() if output is None else made_folder(section.output.absolute(), MADE_BY, overwrite)
        with made as folder, record_bar("generating") as bar:
            for request in requests:
                designs = []
                generated = generate(diffusion, request, section.number, seed=section.seed, tokens=section.tokens)
                for done, item in enumerate(generated, len(tables) * section.number + 1):
                    designs.append(item)
                    bar(done / (len(requests) * section.number), done)
                table = design_table(diffusion, request, designs, search, section.tokens)
                # Without a structure there is no native residue to recover.
                tables.append(table if section.structures else table.drop(columns="recovery"))
                # Appended structure by structure: the probabilities of all designs would need much memory.
                if folder is not None:
                    write_designs(folder, request, designs, tables[-1])
    table = pd.concat(tables, ignore_index=True)
    positions, absent = zip(*fixed, strict=True)
    notes = {
        f"{counted(sum(map(len, positions)), 'residue{s}')} fixed": section.fix,
        f"{counted(sum(absent), 'residue number{s}')} in the ranges missing from the structures": any(absent),
    }
    table.attrs[NOTES] = [line for line, is_shown in notes.items() if is_shown]
    return table


def exported_design(source: str | Path) -> Path:
    """Folder of the sequence diffusion model that ``source`` names. Raises ConfigError for any other model."""
    return exported_by(TASK, source)


def structures_of(options: DesignStructuresSection) -> list[Structure]:
    """Read the chains of the structure files and print which residues were changed or left out.

    Raises DataError for an invalid file or id.
    """
    # `predicted` is false, because designs depend on coordinates only.
    section = StructuresSection(chains=options.chains, ca_only=options.ca_only, predicted=False)
    counts = StructureCounts()
    # The user named these files; training's minimum is meant for large collections.
    structures = read_files(find_structure_files(options.structures), section, counts, min_residues=1)
    check_ids(structures)
    for line in counts.lines():
        print(line, file=sys.stderr)
    return structures


def load_model(source: str | Path, options: DesignModelSection) -> "tuple[SequenceDiffusion, int]":
    """Load the model onto its device and look up the label's number.

    Raises ConfigError for an unknown label or an unavailable device.
    """
    from esmeray.dataset.packed_batch import NO_LABEL
    from esmeray.inference.models.opening import open_model

    model: Any = open_model(exported_design(source), device=options.device, heads=[TASK]).heads[TASK]
    if options.label is not None and options.label not in model.labels:
        known = ", ".join(model.labels) or "none"
        raise ConfigError(f"label {options.label}: the model's labels are {known}")
    return model, NO_LABEL if options.label is None else model.labels.index(options.label)
