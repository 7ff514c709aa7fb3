"""Structure predictors by name: sequences in, backbone atoms with confidences out.

A predictor is a class with ``fingerprint`` and ``predict``, listed in :data:`PREDICTORS`.
"""

from collections.abc import Sequence
from typing import ClassVar, Protocol

import torch

from esmeray.common.errors import ConfigError
from esmeray.dataset.structures.predictions import Predicted
from esmeray.dataset.tokens.model_folder import quiet_transformers
from esmeray.model.backbones.fingerprint import weights_fingerprint


class Predictor(Protocol):
    """A structure prediction model on a device."""

    fingerprint: str
    """Identity of weights, architecture and version. Predictions with different fingerprints are never mixed."""

    def __init__(self, source: str, device: str) -> None:
        """Load from a local folder or hub name."""

    def predict(self, sequences: Sequence[str]) -> list[Predicted]:
        """Predict the structures of a batch."""


class _OfTransformers:
    """A predictor that uses a transformers model."""

    kind: ClassVar[str]

    def __init__(self, source: str, device: str) -> None:
        import transformers

        kind, config = getattr(transformers, self.kind), transformers.AutoConfig.from_pretrained(source)
        # transformers would load any weights into the class and randomly initialize the missing ones.
        if config.model_type != kind.config_class.model_type or not getattr(config, "is_folding_model", True):
            raise ValueError(f"its config.json does not describe a {self.kind}")
        with quiet_transformers():
            self._model = kind.from_pretrained(source, use_safetensors=True).eval().to(device)
        if config.model_type == "esm" and device == "cpu":
            self._model.esm.float()  # its language model is created in fp16, which is slow on CPUs
        self.fingerprint = f"{type(self).__name__.lower()}-{weights_fingerprint(self._model)}"


class EsmFold(_OfTransformers):
    """ESMFold (Lin et al. 2023)."""

    kind = "EsmForProteinFolding"

    @torch.inference_mode()
    def predict(self, sequences: Sequence[str]) -> list[Predicted]:
        folded = self._model.infer(list(sequences))
        # The first four atoms of atom14 are N, CA, C and O.
        atoms = folded["positions"][-1, :, :, :4].float().cpu().numpy()
        confidence = 100 * folded["plddt"][..., 1].float().cpu().numpy()  # confidence of CA
        rows = zip(atoms, confidence, map(len, sequences), strict=True)  # padded to the longest sequence
        return [Predicted(atoms_L[:length], confidence_L[:length]) for atoms_L, confidence_L, length in rows]


class EsmFold2(_OfTransformers):
    """ESMFold2 from the sequence alone: the sample with the highest pTM. The seed is the same in every batch."""

    kind = "EsmFold2Model"

    def predict(self, sequences: Sequence[str]) -> list[Predicted]:
        return list(map(self._predicted, sequences))

    @torch.inference_mode()
    def _predicted(self, sequence: str) -> Predicted:
        from transformers.models.esmfold2.protein_utils import prepare_protein_features

        features = prepare_protein_features(sequence, device=self._model.device)
        # Its diffusion samples noise. One seed per sequence makes the result independent of the batch; fork_rng keeps
        # training's random state.
        with torch.random.fork_rng():
            torch.manual_seed(0)
            folded = self._model.fold(**features)
        best = int(folded["ptm"].argmax())
        residues = torch.arange(len(sequence), device=self._model.device)
        n = torch.searchsorted(features["atom_to_token"][0, features["atom_attention_mask"][0]], residues)
        atoms = folded["sample_atom_coords"][best][n[:, None] + torch.arange(4, device=n.device)]  # N, CA, C, O first
        return Predicted(atoms.cpu().numpy(), 100 * folded["plddt_per_atom"][best, n + 1].cpu().numpy())


PREDICTORS: dict[str, type[Predictor]] = {"esmfold": EsmFold, "esmfold2": EsmFold2}


def predictor(name: str, source: str, device: str) -> Predictor:
    """Load a predictor by its name.

    Raises ConfigError for an unknown name, or if the source can't be loaded.
    """
    if name not in PREDICTORS:
        raise ConfigError(f"predictor {name}: unknown; available: {', '.join(sorted(PREDICTORS))}")
    try:
        return PREDICTORS[name](source, device)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"model {source}: can't be loaded as {name} ({reason})") from error
