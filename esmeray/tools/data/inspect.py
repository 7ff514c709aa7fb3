"""Show the contents of a store as JSON, and check it.

Prints counts, lengths, format and origin. Opening a store checks the manifest, the file's size and its index. --verify
reads everything and checks every byte. The sequences of a labelled store are the store in its folder sequences.

Examples:
  esmeray data inspect uniref50_store
  esmeray data inspect uniref50_store --verify | jq .lengths.median
"""

import json
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from esmeray.dataset.store.reader import Store
from esmeray.tools.grammar import command

_FACTS = ("alphabet", "format_version", "engine", "data_bytes", "checksum", "created", "source", "ingest", "counts")
"""Fields of the manifest that are printed."""


@command("data inspect", __doc__)
def main(
    store: Annotated[Path, Field(description="Folder of the store.")],
    verify: Annotated[bool, Field(description="Read the whole store and verify all checksums.")] = False,
) -> None:
    depth: Literal["full", "quick"] = "full" if verify else "quick"
    opened = Store(store, depth)
    lengths = opened.lengths
    shortest, median, longest = np.percentile(lengths, [0, 50, 100])
    facts = {
        "records": len(opened),
        "residues": opened.manifest.num_residues,
        "lengths": {
            "min": int(shortest),
            "median": float(median),
            "mean": round(float(lengths.mean(dtype=np.float64)), 2),
            "max": int(longest),
        },
        "blocks": opened.manifest.num_blocks,
        **opened.manifest.model_dump(mode="json", include=set(_FACTS)),
        "verified": depth,
    }
    print(json.dumps(facts, indent=1))
