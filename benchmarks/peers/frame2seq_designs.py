"""Designs and likelihoods by Frame2seq (PyPI: frame2seq 0.0.8, MIT), evaluated as ``esmeray design evaluate`` does.

As in its program, all residues are masked, and the mean logits of its three networks are read in one pass. The
likeliest residues are the design, and the same probabilities give the perplexity of the native residues.

Shape legend: L residues of a structure, C sequences, 20 amino acids.
"""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import torch
from torch import Tensor

from esmeray.dataset.fasta.alphabet import AMINO_ACIDS
from esmeray.dataset.structures.store import Structure, StructureStore
from esmeray.inference.design.evaluation import evaluate_designs
from esmeray.inference.design.sampling import AMINO_ACID_IDS

_REPLACED = "frame2seq.utils.protein", "frame2seq.openfold.utils.feats", "frame2seq.openfold.np.residue_constants"


def evaluated(store: str) -> dict[str, dict[str, Any]]:
    """Return metrics of all structures of a store. Call it in a process of its own; see :func:`open_networks`."""
    structures = StructureStore(Path(store))
    networks = open_networks()
    # Computed once: seconds per chain.
    log_p = {backbone.id: _log_p(networks, backbone) for backbone in map(structures.structure, range(len(structures)))}
    designer: Any = SimpleNamespace(
        device=torch.device("cpu"),
        draws=1,
        designed=lambda structure: _designed(structure).numpy(),
        designs=lambda requests, _: _likeliest(torch.cat([log_p[request.structure.id] for request in requests])),
        log_p=lambda structure, texts, *_: log_p[structure.id].expand(len(texts), -1, -1),
    )
    metrics = evaluate_designs(designer, structures, np.arange(len(structures))).metrics
    return {name: {"value": value, "interval": interval} for name, (value, *interval) in metrics.items()}


def open_networks() -> list[Any]:
    """Open the networks in the installed package.

    Modules that read files and that neither its networks nor we need (Lightning, and those that import Biopython and
    dm-tree) are replaced for the whole process.
    """
    members = {"device": torch.device("cpu"), "save_hyperparameters": lambda network: None}
    lightning = MagicMock(LightningModule=type("LightningModule", (torch.nn.Module,), members))
    sys.modules.update({"pytorch_lightning": lightning} | {name: MagicMock() for name in _REPLACED})
    import frame2seq

    networks = []
    for file in sorted(Path(frame2seq.__file__).parent.glob("trained_models/*.ckpt")):
        checkpoint = torch.load(file, weights_only=True)
        frame2seq.frame2seq.hparams = SimpleNamespace(**checkpoint["hyper_parameters"])
        networks.append(frame2seq.frame2seq(None).eval())
        networks[-1].load_state_dict(checkpoint["state_dict"])
    return networks


def _designed(structure: Structure) -> Tensor:
    """(L,) true for residues with N, CA and C."""
    return torch.from_numpy(structure.coordinates[:, :3]).isfinite().all((1, 2))


@torch.inference_mode()
def _log_p(networks: list[Any], structure: Structure) -> Tensor:
    """(L, 20) log-probabilities of the amino acids at each position."""
    from frame2seq.utils.place_ideal_atoms import place_missing_cb, place_missing_o

    atoms_L53 = torch.zeros(len(structure.residues), 5, 3)
    atoms_L53[:, :3] = torch.from_numpy(structure.coordinates[:, :3]).nan_to_num()
    atoms_1L53 = place_missing_o(place_missing_cb(atoms_L53))[None]  # placed by the program, also if a file has them
    masked_1LK = torch.eye(21)[-1].expand(1, len(atoms_L53), -1)
    logits = [network(atoms_1L53, _designed(structure)[None], masked_1LK)[0] for network in networks]
    return torch.stack(logits).mean(0).log_softmax(-1)[:, : len(AMINO_ACIDS)]


def _likeliest(log_p_L20: Tensor) -> tuple[Tensor, Tensor]:
    return AMINO_ACID_IDS[log_p_L20.argmax(-1)], log_p_L20.exp()
