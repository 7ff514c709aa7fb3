"""Inputs of all contenders: proteins, and an ESM-2 with random weights from a fixed seed.

The proteins are the user's, or the UniRef90 sample of development, or the embedded sample.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from transformers import EsmForMaskedLM

from benchmarks.harness.stage import DEVELOPMENT_DATA, Setting, WrongWorkError
from esmeray.dataset.section import DataSection, SampleSection
from esmeray.dataset.store.conversion import SAMPLE, ensure_store
from esmeray.dataset.store.reader import Store
from esmeray.model.backbones.loading import load_network
from esmeray.model.section import BackboneSection

MAX_RESIDUES = 1022
"""Length that ESM-2 was trained with; every contender crops longer proteins at their start to this."""

_UNIREF90 = DEVELOPMENT_DATA / "uniref90_10k.fasta.gz"
MIN_COSINE = 0.999


def read_proteins(setting: Setting) -> list[str]:
    """Return all proteins as a store has them, and name their source among the facts."""
    source = str(setting.fasta or (_UNIREF90 if _UNIREF90.is_file() else SAMPLE))
    setting.facts["proteins from"] = Path(source).name
    store = Store(make_store(source, setting.folder))
    return [store.text(record) for record in range(len(store))]


def make_store(source: Path | str, folder: Path) -> Path:
    """Convert a FASTA file, or the embedded sample, to a store in a folder; return the store's folder."""
    sample = SampleSection(records=10_000, families=200)
    return ensure_store(DataSection(source=[str(source)], sample=sample), folder)


def spread_by_length(sequences: Sequence[str], number: int) -> list[str]:
    """Return ``number`` sequences with the same distribution of lengths, including the longest.

    They are cropped to :data:`MAX_RESIDUES`, in the order of the file.
    """
    by_length = np.argsort([len(sequence) for sequence in sequences], kind="stable")
    # Evenly over the ranks, ends included: the longest decides the memory, and a random choice may miss it.
    ranks = np.linspace(0, len(sequences) - 1, min(number, len(sequences))).round().astype(int)
    return [sequences[index][:MAX_RESIDUES] for index in sorted(by_length[ranks])]


def write_fasta(path: Path, sequences: Sequence[str]) -> Path:
    """Write a record for each sequence; return the path."""
    path.write_text("".join(f">protein{number:08d}\n{sequence}\n" for number, sequence in enumerate(sequences)))
    return path


def random_network(size: str, **changes: int) -> EsmForMaskedLM:
    """Return an ESM-2 in fp32 on the CPU, with these changes of its config; the same weights each time."""
    return load_network(BackboneSection.model_validate({"source": size, **changes}), seed=0).eval()


def require_agreement(reference: str, vectors: Mapping[str, NDArray[np.float32]]) -> None:
    """Raise WrongWorkError if a contender's vectors have a cosine below 0.999 with the reference's vectors."""
    units = {name: own_ND / np.linalg.norm(own_ND, axis=1, keepdims=True) for name, own_ND in vectors.items()}
    for name, units_ND in units.items():
        cosine = float((units_ND * units[reference]).sum(axis=1).min())
        if not cosine >= MIN_COSINE:  # also true for NaN
            raise WrongWorkError(f"the embeddings of {name} have a cosine of {cosine:.5f} with {reference}")
