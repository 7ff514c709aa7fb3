"""Frame2seq (PyPI: frame2seq 0.0.8, MIT), its own networks, as a model that the evaluation of designs accepts.

As in its program: all residues are masked, and the mean logits of three networks are read in one pass. The likeliest
residues are the design; the probabilities of the native residues are the perplexity. Run it in a process of its own,
since modules of packages that it imports and does not need here (Lightning, Biopython, dm-tree) are replaced.

Shape legend: L residues of a structure, R residues of several structures, C sequences.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esmeray.dataset.fasta.alphabet import AMINO_ACIDS
from esmeray.dataset.structures.store import Structure, StructureStore
from esmeray.inference.design.evaluation import evaluate_designs
from esmeray.inference.design.sampling import AMINO_ACID_IDS, Request

_LETTERS = 21
"""The amino acids and the mask."""
_REPLACED = "frame2seq.utils.protein", "frame2seq.openfold.utils.feats", "frame2seq.openfold.np.residue_constants"


def evaluated(store: str) -> dict[str, dict[str, Any]]:
    """Return metrics of all structures of a store, as ``esmeray design evaluate`` writes them."""
    structures = StructureStore(Path(store))
    metrics = evaluate_designs(Frame2seq(), structures, np.arange(len(structures))).metrics
    return {name: {"value": value, "interval": interval} for name, (value, *interval) in metrics.items()}


class Frame2seq:
    """Designer by Frame2seq; see :class:`~esmeray.inference.design.sampling.Designer`."""

    weights, draws, device = "Frame2seq (MIT license)", 1, torch.device("cpu")
    labels = unsupported = ()

    def __init__(self) -> None:
        module = {"device": self.device, "save_hyperparameters": lambda network: None}
        lightning = MagicMock(LightningModule=type("LightningModule", (torch.nn.Module,), module))
        sys.modules.update({"pytorch_lightning": lightning} | {name: MagicMock() for name in _REPLACED})
        import frame2seq

        self._networks: list[Any] = []
        for file in sorted(Path(frame2seq.__file__).parent.glob("trained_models/*.ckpt")):
            checkpoint = torch.load(file, weights_only=True)
            frame2seq.frame2seq.hparams = SimpleNamespace(**checkpoint["hyper_parameters"])
            self._networks.append(frame2seq.frame2seq(None).eval())
            self._networks[-1].load_state_dict(checkpoint["state_dict"])

    def designed(self, structure: Structure) -> NDArray[np.bool_]:
        return np.isfinite(structure.coordinates[:, :3]).all((1, 2))

    def designs(self, requests: Sequence[Request], generators: Sequence[torch.Generator]) -> tuple[Tensor, Tensor]:
        p_R20 = torch.cat([self._log_p(request.structure) for request in requests]).exp()
        return AMINO_ACID_IDS[p_R20.argmax(-1)], p_R20

    def log_p(self, structure: Structure, texts: Sequence[str], draws: Sequence[int], label: int) -> Tensor:
        letters_CL = torch.tensor([[AMINO_ACIDS.find(letter) for letter in text] for text in texts])
        return self._log_p(structure).gather(1, letters_CL.clamp(min=0).T).T.masked_fill(letters_CL < 0, torch.nan)

    def _log_p(self, structure: Structure) -> Tensor:
        """Return (L, 20) log-probabilities, NaN for residues that are not designed."""
        from frame2seq.utils.place_ideal_atoms import place_missing_cb, place_missing_o

        designed = self.designed(structure)
        atoms_L53 = torch.zeros(designed.sum(), 5, 3)
        atoms_L53[:, :3] = torch.from_numpy(structure.coordinates[designed, :3])
        atoms = place_missing_o(place_missing_cb(atoms_L53))[None]  # placed by the program, also if a file has them
        masked = torch.eye(_LETTERS)[-1].expand(1, len(atoms_L53), -1)
        inside = torch.ones(masked.shape[:2], dtype=torch.bool)
        logits = torch.stack([network(atoms, inside, masked) for network in self._networks]).mean(0)[0]
        log_p_L20 = torch.full((len(designed), len(AMINO_ACIDS)), torch.nan)
        log_p_L20[designed] = logits.log_softmax(-1)[:, : len(AMINO_ACIDS)]
        return log_p_L20
