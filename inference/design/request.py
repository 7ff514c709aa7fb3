"""A trained model and structures as the design tools' arguments name them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from pydantic import Field

from common.arguments import ToolArguments
from common.errors import ConfigError
from dataset.structures.conversion import check_ids, find_structure_files
from dataset.structures.files import read_structures
from dataset.structures.store import Structure, StructureCounts
from inference.models.source import exported_by, find_model
from train_config.diffusion_schema import CaOnly, StructuresSection

if TYPE_CHECKING:
    from model.tasks.diffusion import SequenceDiffusion


class ModelOptions(ToolArguments):
    """Model and device."""

    model: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")] = Field(
        description="Run that trained sequence diffusion, or its export."
    )
    label: str | None = Field(None, description="Class to condition on.")
    device: str | None = Field(None, description="cpu or cuda. Default: CUDA where there is one.")
    tokens: int = Field(8192, gt=0, description="Token budget of a batch.")


class DesignOptions(ModelOptions):
    """The same with structures."""

    structure: list[str] = Field([], description="Structure files, folders or globs.")
    chain: str = Field("each", description="each, first, complex, or names of chains, as A,B.")
    ca_only: CaOnly = Field("error", description="Chains of CA atoms alone: refuse, leave out or complete them.")


def refuse_designs(source: str) -> None:
    """Raise ConfigError for a model of sequence diffusion, whose backbone alone says little."""
    if find_model(source, "models").task == "diffusion":
        raise ConfigError(
            f"models: {source}: sequence diffusion is not served; design with it by 'esmeray design generate {source}'"
        )


def structures_of(options: DesignOptions) -> list[Structure]:
    """Chains of the structure files; what was changed or left out is said. Raises DataError for a file or id that is
    refused."""
    section = StructuresSection(chains=options.chain, min_residues=1, ca_only=options.ca_only)
    counts = StructureCounts()
    files = find_structure_files(options.structure)
    structures = [structure for path in files for structure in read_structures(path, section, counts)]
    check_ids(structures)
    for line in counts.lines():
        print(line, file=sys.stderr)
    return structures


def load_model(options: ModelOptions) -> tuple[SequenceDiffusion, int]:
    """The model on its device, and the number of the label.

    Raises ConfigError for an unknown label, or where there is no such device.
    """
    from dataset.packed_batch import NO_LABEL
    from inference.models.opening import open_model

    folder = exported_by("diffusion", options.model)
    model: Any = open_model(folder, device=options.device, heads=["diffusion"]).heads["diffusion"]
    if options.label is not None and options.label not in model.labels:
        known = ", ".join(model.labels) or "none"
        raise ConfigError(f"--label {options.label}: the model knows {known}")
    label = NO_LABEL if options.label is None else model.labels.index(options.label)
    return model, label
