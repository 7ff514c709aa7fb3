"""Small structures and their PDB files."""

from pathlib import Path

import numpy as np

from esmeray.dataset.section import DataSection, StructuresSection
from esmeray.dataset.structures.conversion import convert_structures
from esmeray.dataset.structures.sample import sample_structure
from esmeray.dataset.structures.store import Structure, StructureStore
from esmeray.tasks.section import ModelSection

THREE = {
    **{"A": "ALA", "C": "CYS", "D": "ASP", "E": "GLU", "F": "PHE", "G": "GLY", "H": "HIS", "I": "ILE", "K": "LYS"},
    **{"L": "LEU", "M": "MET", "N": "ASN", "P": "PRO", "Q": "GLN", "R": "ARG", "S": "SER", "T": "THR", "V": "VAL"},
    **{"W": "TRP", "Y": "TYR"},
}


def folds(number: int, seed: int = 0) -> list[Structure]:
    return [sample_structure(index, seed) for index in range(number)]


def pdb_lines(structure: Structure, chain: str = "A", record: str = "ATOM", first: int = 1) -> list[str]:
    """Lines of a PDB file; unknown atoms are left out."""
    lines = []
    for number, (letter, atoms) in enumerate(zip(structure.residues, structure.coordinates, strict=True), first):
        for name, atom_xyz in zip(("N", "CA", "C", "O"), atoms, strict=True):
            if np.isfinite(atom_xyz).all():
                x, y, z = atom_xyz.tolist()
                lines.append(
                    f"{record:<6}{len(lines) + 1:>5}  {name:<3} {THREE[letter]} {chain}{number:>4}    "
                    f"{x:8.3f}{y:8.3f}{z:8.3f}  1.00 50.00          {name[0]:>2}"
                )
    return lines


def write_pdb(path: Path, *chains: list[str]) -> Path:
    path.write_text("\n".join([line for chain in chains for line in [*chain, "TER"]] + ["END"]) + "\n")
    return path


def write_models(path: Path, lines: list[str], number: int = 1) -> Path:
    """Write the atoms of PDB lines as ``number`` models, in PDB, mmCIF or BinaryCIF according to the suffix."""
    from biotite import structure
    from biotite.structure.io import pdb, pdbx

    plain = write_pdb(path.with_suffix(".pdb"), lines)
    if path.suffix != ".pdb":
        atoms = pdb.PDBFile.read(plain).get_structure(model=1, extra_fields=["b_factor", "occupancy"])
        file = pdbx.BinaryCIFFile() if path.suffix == ".bcif" else pdbx.CIFFile()
        pdbx.set_structure(file, structure.stack([atoms] * number))
        (pdbx.compress(file) if path.suffix == ".bcif" else file).write(path)
    return path


def structure_store(folder: Path, number: int = 12, **settings: object) -> StructureStore:
    """A store of sample folds."""
    data = DataSection(sample={"records": number}, **settings)  # type: ignore[arg-type]
    convert_structures(["sample"], folder, data)
    return StructureStore(folder)


TINY_DIFFUSION = ModelSection.model_validate(
    {
        "task": "diffusion",
        "backbone": {"source": "esm2_t6_8M", "layers": 2, "hidden_size": 32, "heads": 4},
        "diffusion": {"adapter_size": 16, "encoder": {"hidden_size": 16, "layers": 2, "neighbours": 8}},
    }
)
EACH = StructuresSection()


def save_proteinmpnn(path: Path) -> Path:
    """Save random weights of ProteinMPNN in the format of the published ones."""
    import torch

    from esmeray.model.structures.proteinmpnn import ProteinMPNN

    torch.manual_seed(0)
    torch.save({"num_edges": 8, "noise_level": 0.2, "model_state_dict": ProteinMPNN().state_dict()}, path)
    return path


def save_esmfold(folder: Path) -> Path:
    """Save an ESMFold with two layers, one block and random weights."""
    import torch
    from transformers import EsmConfig, EsmForProteinFolding
    from transformers.models.esm.configuration_esm import get_default_vocab_list

    torch.manual_seed(0)
    trunk = {
        **{"num_blocks": 1, "sequence_state_dim": 32, "pairwise_state_dim": 16, "sequence_head_width": 8},
        **{"pairwise_head_width": 8, "position_bins": 8, "max_recycles": 1},
        "structure_module": {
            **{"sequence_dim": 16, "pairwise_dim": 16, "ipa_dim": 4, "resnet_dim": 8, "num_heads_ipa": 2},
            **{"num_blocks": 2, "num_transition_layers": 1, "num_resnet_blocks": 1},
        },
    }
    config = EsmConfig(
        **{"vocab_size": 33, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2},
        **{"intermediate_size": 32, "position_embedding_type": "rotary", "pad_token_id": 1, "mask_token_id": 32},
        is_folding_model=True,
        esmfold_config={"trunk": trunk, "fp16_esm": False, "lddt_head_hid_dim": 8},
        vocab_list=list(get_default_vocab_list()),
    )
    EsmForProteinFolding(config).save_pretrained(folder)
    return folder
