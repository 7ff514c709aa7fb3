"""Show the contents of a store, and check it.

Prints counts, lengths, residue composition, format and origin; for a labelled store also its parts and classes. Opening
a store checks the manifest, the file's size and its index. --verify reads everything and checks every byte.

Examples:
  esmeray data inspect uniref50_store
  esmeray data inspect uniref50_store --verify
  esmeray data inspect uniref50_store --json | jq .lengths.median
"""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field
from rich.markup import escape
from rich.table import Column, Table

from esmeray.common.command_line import result_console
from esmeray.common.text import counted
from esmeray.dataset.fasta.counts import count_lines
from esmeray.dataset.labels.store import MANIFEST_FILE as LABELS_MANIFEST
from esmeray.dataset.labels.store import LabelledStore
from esmeray.dataset.store.format import SampleSource
from esmeray.dataset.store.reader import Store
from esmeray.tools.grammar import command

_BIN_EDGES = (0, 50, 100, 200, 300, 400, 500, 750, 1000, 1500, 2000, 5000, 10_000, 20_000, 50_000)


@command("data inspect", __doc__)
def main(
    store: Annotated[Path, Field(description="Folder of the store.")],
    verify: Annotated[bool, Field(description="Read the whole store and verify all checksums.")] = False,
    json_: Annotated[bool, Field(description="Print one JSON object instead of tables.")] = False,
) -> None:
    depth: Literal["full", "quick"] = "full" if verify else "quick"
    # A labelled store is a store with an additional manifest of labels.
    labelled = LabelledStore(store, depth) if (store / LABELS_MANIFEST).is_file() else None
    opened = Store(store, depth) if labelled is None else labelled.store
    counts = opened.manifest.counts if labelled is None else labelled.counts
    facts = _facts(opened) | {"counts": counts.model_dump(), "verified": depth}
    if labelled is not None:
        facts["labels"] = _label_facts(labelled)
    if json_:
        print(json.dumps(facts, indent=1))
        return
    console = result_console()
    console.print(_overview(str(store), opened, count_lines(counts), facts))
    lengths = [(f"{bar['from']:,} to {bar['to'] - 1:,}", bar["records"]) for bar in facts["lengths"]["histogram"]]
    tables = [_bars("length in residues", lengths), _bars("residue", list(facts["composition"].items()))]
    if labelled is not None:
        labels = facts["labels"]
        rows = {"all": labels["parts"], **labels.get("classes", {})}
        cells = [[escape(name), *(f"{number:,}" for number in numbers.values())] for name, numbers in rows.items()]
        tables.append(_table([labels["kind"], *labels["parts"]], cells))
    for table in tables:
        console.print("", table, sep="\n")


def _facts(store: Store) -> dict[str, Any]:
    """Facts to print, as plain values."""
    manifest, lengths = store.manifest, store.lengths
    of_manifest = {"alphabet", "format_version", "engine", "data_bytes", "checksum", "created", "source", "ingest"}
    shortest, median, longest = np.percentile(lengths, [0, 50, 100])
    # The last bin extends to the longest record, so that the histogram counts every record.
    edges = np.array([*_BIN_EDGES, max(int(longest), _BIN_EDGES[-1]) + 1])
    numbers, _ = np.histogram(lengths, bins=edges)
    filled = np.flatnonzero(numbers)  # empty bins at both ends are left out
    histogram = [
        {"from": start, "to": end, "records": number}
        for start, end, number in zip(edges.tolist(), edges[1:].tolist(), numbers.tolist(), strict=False)
    ]
    # Read in blocks: the residues of a UniRef store take tens of gigabytes.
    residues = np.sum([np.bincount(block, minlength=256) for block in store.residue_blocks()], axis=0)
    return {
        "records": manifest.num_records,
        "residues": manifest.num_residues,
        "lengths": {
            "min": int(shortest),
            "median": float(median),
            "mean": round(float(lengths.mean(dtype=np.float64)), 2),
            "max": int(longest),
            "histogram": histogram[filled[0] : filled[-1] + 1],
        },
        "composition": {
            chr(code): int(residues[code]) for code in np.argsort(-residues, kind="stable") if residues[code]
        },
        "blocks": manifest.num_blocks,
        **manifest.model_dump(mode="json", include=of_manifest),
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


def _overview(name: str, store: Store, counts: list[str], facts: dict[str, Any]) -> Table:
    manifest = store.manifest
    rows = {
        "store": name,
        "records": f"{manifest.num_records:,}",
        "residues": f"{manifest.num_residues:,}",
        "lengths": "{min:,} to {max:,}, median {median:,g}, mean {mean:,g}".format_map(facts["lengths"]),
        "alphabet": manifest.alphabet,
        "format": f"version {manifest.format_version}, {manifest.engine}, {counted(manifest.num_blocks, 'block{s}')}",
        "size": f"{manifest.data_bytes / 1e6:,.1f} MB",
        "checksum": manifest.checksum,
        "created": manifest.created,
        "source": _source(store),
        "ingest": "\n".join(counts),
        "verified": "every byte" if facts["verified"] == "full" else "manifest, size and index (--verify reads all)",
    }
    table = Table.grid(padding=(0, 2, 0, 0))
    for label, value in rows.items():
        table.add_row(f"[bold]{label}[/bold]", escape(value))  # a path may hold [brackets]
    return table


def _bars(title: str, rows: list[tuple[str, int]]) -> Table:
    most, total = max(number for _, number in rows), sum(number for _, number in rows)
    cells = [
        [label, f"{number:,}", f"{100 * number / total:.2f} %", "█" * round(40 * number / most)]
        for label, number in rows
    ]
    table = _table([title, "number", "share", ""], cells)
    table.columns[-1].justify = "left"  # align the starts of the bars
    return table


def _table(header: list[str], rows: list[list[str]]) -> Table:
    table = Table(
        *(Column(heading, justify="right") for heading in header),
        box=None,
        padding=(0, 2, 0, 0),
        header_style="bold",
    )
    for row in rows:
        table.add_row(*row)
    return table


def _source(store: Store) -> str:
    source = store.manifest.source
    if isinstance(source, SampleSource):
        families = counted(source.families, "famil{ies}")
        return f"embedded sample: {counted(source.records, 'record{s}')}, {families}, seed {source.seed}"
    lines = [f"{file.path} ({file.bytes / 1e6:,.1f} MB)" for file in source[:5]]
    return "\n".join(lines if len(source) <= 5 else [*lines, f"and {len(source) - 5:,} more"])
