"""Settings of design, and ``esmeray design generate`` as a function of Python.

Designs are written structure by structure. Mistakes are reported before torch is loaded: the last structure may lack a
residue that is to be fixed.
"""

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Unpack

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
from esmeray.inference.design.positions import bias_of, fixed_positions, read_bias, tied_positions
from esmeray.inference.models.source import exported_by, find_model
from esmeray.model.export import proteinmpnn_weights
from esmeray.model.export.exported_folder import task_of
from esmeray.model.export.proteinmpnn_weights import published_weights
from esmeray.train_config.section import DEFAULT_TOKENS, NonNegativeFloat, NonNegativeInt, PositiveInt, Section

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    from numpy.typing import NDArray

    from esmeray.inference.design.sampling import Designer
    from esmeray.inference.settings import DesignSettings

MADE_BY = "generate"
TASK = "diffusion"


class DesignModelSection(Section):
    """Settings to run a model that designs."""

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
    bias: Path | None = None
    """JSON or YAML file of numbers to add to the logits of amino acids, e.g. {"C": -2, "10-20": {"K": 1.5}}."""
    tie: str = ""
    """Chains of a complex that get the same residues, e.g. A,B."""
    temperature: Annotated[float, Field(ge=0, le=1000)] = 0.1
    """Sampling temperature. 0: the likeliest residue; 1: the model's probabilities."""
    steps: Annotated[int, Field(gt=0, le=1000)] = 20
    """Number of denoising steps per sequence, for a model of sequence diffusion."""
    guidance: NonNegativeFloat = 1.0
    """Weight of the structure, for sequence diffusion; above 1 it has more influence than in training."""
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
        model: folder of a run of sequence diffusion or of an export of one; or weights of ProteinMPNN: ``proteinmpnn``,
            ``soluble``, ``ca``, one of these with a version (``proteinmpnn/v_48_002``), or a .pt file.
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
        letter_biases = {} if section.bias is None else read_bias(section.bias)
        fixed, absent = zip(*(fixed_positions(section.fix, item) for item in items), strict=True)
        biases = [bias_of(letter_biases, section.omit, item) for item in items]
        tied = [tied_positions(section.tie, *pair) for pair in zip(items, fixed, strict=True)]
        made = nullcontext() if output is None else made_folder(section.output.absolute(), MADE_BY, overwrite)
        with made as folder:
            table = _generated(model, section, list(zip(items, fixed, biases, tied, strict=True)), known, folder)
    counts = {
        "residue{s} fixed": sum(map(len, fixed)),
        "residue number{s} in the ranges missing from the structures": sum(absent),
    }
    table.attrs[NOTES] += [counted(number, words) for words, number in counts.items() if number]
    return table


def _generated(
    model: str | Path,
    section: GenerateSection,
    items: "list[tuple[Structure, tuple[int, ...], NDArray[np.float32], tuple[tuple[int, ...], ...]]]",
    known: Store | None,
    folder: Path | None,
) -> "pd.DataFrame":
    """Generate for each structure, with its fixed positions, biases and tied positions. Write to the folder, if any."""
    designer, label = load_model(model, section)
    from esmeray.alignment.scoring import scoring  # here: they load parasail, torch and Matplotlib
    from esmeray.alignment.search import Search
    from esmeray.inference.design.report import design_table, pd, write_designs
    from esmeray.inference.design.sampling import Request, generate, weights_notes

    sampling = section.model_dump(include={"temperature", "steps", "guidance"})
    search = None if known is None else Search(known, scoring())
    tables: list[pd.DataFrame] = []
    requests = [Request(*item, label, **sampling) for item in items]
    generated = generate(designer, requests, section.number, seed=section.seed, tokens=section.tokens)
    with record_bar("generating") as bar:
        for request in requests:
            designs = []
            for done, item in enumerate(islice(generated, section.number), len(tables) * section.number + 1):
                designs.append(item)
                bar(done / (len(items) * section.number), done)
            table = design_table(designer, request, designs, search, section.tokens)
            # Without a structure there is no native residue to recover.
            tables.append(table if section.structures else table.drop(columns="recovery"))
            # Appended structure by structure: the probabilities of all designs would need much memory.
            if folder is not None:
                write_designs(folder, request, designs, tables[-1])
    table = pd.concat(tables, ignore_index=True)
    kept = sum(int((~designer.designed(request.structure)).sum()) for request in requests)
    table.attrs[NOTES] = weights_notes(designer)
    if kept:
        table.attrs[NOTES].append(f"{counted(kept, 'residue{s}')} without coordinates kept")
    return table


def exported_design(source: str | Path) -> Path:
    """Folder of the model that ``source`` names, or .pt file of ProteinMPNN. Raises ConfigError for any other model."""
    return published_weights(source) or exported_by(TASK, source, proteinmpnn_weights.TASK)


def is_designer(source: str | Path) -> bool:
    """Test whether the model designs sequences for structures."""
    return published_weights(source) is not None or find_model(source).task in (TASK, proteinmpnn_weights.TASK)


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


def open_designer(source: str | Path, device: str | None) -> "Designer":
    """Open a model that designs sequences. Raises ConfigError for any other model or an unavailable device."""
    from esmeray.inference.design.autoregression import AutoregressiveDesigner  # here: they load torch
    from esmeray.inference.design.denoising import Denoiser
    from esmeray.inference.models.opening import open_model
    from esmeray.model.device import check_device, choose_device

    path = exported_design(source)
    if path.is_dir() and task_of(path) == TASK:
        model: Any = open_model(path, device=device, heads=[TASK]).heads[TASK]
        return Denoiser(model)
    target = device or choose_device()
    check_device(target)
    network, settings = proteinmpnn_weights.open_proteinmpnn(path)
    return AutoregressiveDesigner(network.to(target), settings.title)


def load_model(source: str | Path, options: DesignModelSection) -> "tuple[Designer, int]":
    """Load the model onto its device and look up the label's number.

    Raises ConfigError for an unknown label, an unavailable device, or a setting that the model does not have.
    """
    from esmeray.dataset.packed_batch import NO_LABEL

    model = open_designer(source, options.device)
    if options.label is not None and options.label not in model.labels:
        known = ", ".join(model.labels) or "none"
        raise ConfigError(f"label {options.label}: the model's labels are {known}")
    for name in model.unsupported:
        if getattr(options, name, None) != getattr(type(options).model_fields.get(name), "default", None):
            raise ConfigError(f"{name} {getattr(options, name)}: {source} has no such setting; remove it")
    return model, NO_LABEL if options.label is None else model.labels.index(options.label)
