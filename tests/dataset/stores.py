"""Small real stores for tests of what reads them."""

from pathlib import Path

import numpy as np

from esmeray.dataset.store.reader import Store
from tests.dataset import store_fixtures


def make_store(folder: Path, count: int = 120, longest: int = 300) -> Path:
    """A store of random proteins of 5 to ``longest`` residues."""
    random = np.random.default_rng(0)
    residues = np.frombuffer(b"ACDEFGHIKLMNPQRSTVWY", dtype=np.uint8)
    lengths = random.integers(5, longest, count)
    proteins = [random.choice(residues, length).tobytes().decode() for length in lengths]
    return store_fixtures.make_store(folder, [(f"protein{index}", protein) for index, protein in enumerate(proteins)])


def damage_record(store_path: Path, record: int) -> None:
    """Flip one bit in the residues of a record."""
    residues = Store(store_path).sequence(record).tobytes()
    data = bytearray((store_path / "data.mdb").read_bytes())
    data[data.index(residues)] ^= 1
    # A new file, because the old one is mapped into this process.
    (store_path / "damaged.mdb").write_bytes(data)
    (store_path / "damaged.mdb").replace(store_path / "data.mdb")
