"""Show the contents of a store as JSON, and check it.

Prints counts, lengths, format and origin; for a labelled store also its parts and classes. Opening
a store checks the manifest, the file's size and its index. --verify reads everything and checks every byte.

Examples:
  esmeray data inspect uniref50_store
  esmeray data inspect uniref50_store --verify | jq .lengths.median
"""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from esmeray.dataset.labels.store import MANIFEST_FILE as LABELS_MANIFEST
from esmeray.dataset.labels.store import LabelledStore
from esmeray.dataset.store.reader import Store
from esmeray.tools.grammar import command

_OF_MANIFEST = {"alphabet", "format_version", "engine", "data_bytes", "checksum", "created", "source", "ingest"}


@command("data inspect", __doc__)
def main(
    store: Annotated[Path, Field(description="Folder of the store.")],
    verify: Annotated[bool, Field(description="Read the whole store and verify all checksums.")] = False,
) -> None:
    depth: Literal["full", "quick"] = "full" if verify else "quick"
    # A labelled store is a store with an additional manifest of labels.
    labelled = LabelledStore(store, depth) if (store / LABELS_MANIFEST).is_file() else None
    opened = Store(store, depth) if labelled is None else labelled.store
    counts = opened.manifest.counts if labelled is None else labelled.counts
    facts = _facts(opened) | {"counts": counts.model_dump(), "verified": depth}
    if labelled is not None:
        facts["labels"] = _label_facts(labelled)
    print(json.dumps(facts, indent=1))


def _facts(store: Store) -> dict[str, Any]:
    """Facts to print, as plain values."""
    lengths = store.lengths
    shortest, median, longest = np.percentile(lengths, [0, 50, 100])
    return {
        "records": len(store),
        "residues": store.manifest.num_residues,
        "lengths": {
            "min": int(shortest),
            "median": float(median),
            "mean": round(float(lengths.mean(dtype=np.float64)), 2),
            "max": int(longest),
        },
        "blocks": store.manifest.num_blocks,
        **store.manifest.model_dump(mode="json", include=_OF_MANIFEST),
    }


def _label_facts(labelled: LabelledStore) -> dict[str, Any]:
    """Kind of labels, and the number of records per part and class."""
    space = labelled.label_space
    parts = {"training": labelled.training, "validation": labelled.validation, "test": labelled.test}
    facts: dict[str, Any] = {
        "kind": space.kind,
        "names": list(space.names),
        "parts": {name: int(records.size) for name, records in parts.items()},
    }
    if space.kind in ("multiclass", "binary"):  # other kinds don't have one class per record
        counts = {n: np.bincount(labelled.targets[r], minlength=len(space.names)).tolist() for n, r in parts.items()}
        facts["classes"] = {
            name: {part: numbers[index] for part, numbers in counts.items()} for index, name in enumerate(space.names)
        }
    return facts
