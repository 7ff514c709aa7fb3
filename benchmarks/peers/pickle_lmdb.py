"""The usual set-up for protein data since TAPE (Rao et al. 2019): one pickled dictionary a record in LMDB.

Written and read as tape/datasets.py and the scripts around it do: a decimal key for each record, ``num_examples`` at
the end, a Dataset that unpickles one record at a time, and a collate function that tokenizes and pads.
"""

import pickle
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import lmdb


def write_pickles(path: Path | str, records: Iterable[tuple[str, str]]) -> int:
    """One ``put`` a record into an LMDB, all in one transaction; return the number of records."""
    number = 0
    # Sparse: of the 64 GiB only what is written takes space.
    with lmdb.open(str(path), map_size=2**36) as environment, environment.begin(write=True) as transaction:
        for identifier, sequence in records:
            item = {"id": identifier, "primary": sequence, "protein_length": len(sequence)}
            # The number and not the id is the key: a Dataset is asked for the n-th record.
            transaction.put(str(number).encode(), pickle.dumps(item))
            number += 1
        transaction.put(b"num_examples", pickle.dumps(number))
    return number


def convert_fasta(fasta: Path | str, target: Path | str) -> int:
    """FASTA to such an LMDB, parsed by pyfastx, the fastest parser with a record at a time."""
    import pyfastx

    return write_pickles(target, pyfastx.Fastx(str(fasta), format="fasta"))


class PickleDataset:
    """Records of such an LMDB, as a map-style dataset; ours and trusted, since unpickling can run code.

    No subclass of torch's Dataset, which a DataLoader doesn't ask for: writing is measured in a process without torch.
    """

    def __init__(self, path: Path) -> None:
        # Without read-ahead, as usual where records are shuffled: it would read pages that nobody asks for.
        self._environment = lmdb.open(str(path), readonly=True, lock=False, readahead=False, meminit=False)
        with self._environment.begin() as transaction:
            self._number: int = pickle.loads(transaction.get(b"num_examples", b""))  # noqa: S301 - what TAPE's users do

    def __len__(self) -> int:
        return self._number

    def __getitem__(self, index: int) -> dict[str, Any]:
        with self._environment.begin() as transaction:
            return pickle.loads(transaction.get(str(index).encode(), b""))  # noqa: S301 - what TAPE's users do


def padded_batches(tokenizer: Any, max_length: int) -> Callable[[list[dict[str, Any]]], Any]:
    """A collate function: tokenize, crop and pad the records of a batch."""

    def collate(items: list[dict[str, Any]]) -> Any:
        sequences = [item["primary"] for item in items]
        return tokenizer(sequences, padding=True, truncation=True, max_length=max_length, return_tensors="pt")

    return collate
