"""Show what a store holds, and check it.

Prints counts, lengths, residue composition, format and origin; of a labelled store also its parts and classes. Opening
checks the manifest, the file's size and its index; --verify reads everything and checks every byte.

Examples:
  python -m tools inspect uniref50_store
  python -m tools inspect uniref50_store --verify
  python -m tools inspect uniref50_store --json | jq .lengths.median
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import tyro
from pydantic import Field
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from common.arguments import ToolArguments, parse
from common.text import counted
from dataset.fasta.counts import IngestCounts, count_lines
from dataset.labels.store import MANIFEST_FILE as LABELS_MANIFEST
from dataset.labels.store import LabelledStore
from dataset.store.format import SampleSource
from dataset.store.reader import Store

_BAR_WIDTH = 40
_UNWRAPPED_WIDTH = 10_000
_BIN_EDGES = (0, 50, 100, 200, 300, 400, 500, 750, 1000, 1500, 2000, 5000, 10_000, 20_000, 50_000)


class Arguments(ToolArguments):
    """What to look at."""

    store: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="STORE")] = Field(
        description="Folder of the store."
    )
    verify: Annotated[bool, tyro.conf.FlagCreatePairsOff] = Field(
        False, description="Read all of it and check every checksum."
    )
    json_: Annotated[bool, tyro.conf.FlagCreatePairsOff, tyro.conf.arg(name="json")] = Field(
        False, description="Print one JSON object in place of the tables."
    )


def main(argv: list[str]) -> int:
    """Open a store and print what is in it."""
    arguments = parse(Arguments, argv, "inspect", __doc__)
    path = Path(arguments.store)
    verify: Literal["full", "quick"] = "full" if arguments.verify else "quick"
    labelled = LabelledStore(path, verify) if (path / LABELS_MANIFEST).is_file() else None
    store = Store(path, verify) if labelled is None else labelled.store
    if arguments.verify:
        store.verify_blocks()
    facts = describe(store)
    if labelled is not None:
        facts |= {"labels": describe_labels(labelled), "counts": labelled.counts.model_dump()}
    counts = store.manifest.counts if labelled is None else labelled.counts
    facts["verified"] = "full" if arguments.verify else "quick"
    if arguments.json_:
        print(json.dumps(facts, indent=1))
    else:
        # Into a file or pipe nothing is wrapped.
        width = None if sys.stdout.isatty() else _UNWRAPPED_WIDTH
        Console(highlight=False, width=width).print(_report(arguments.store, store, counts, facts))
    return 0


def describe(store: Store) -> dict[str, Any]:
    """Everything that is printed, as plain values."""
    manifest = store.manifest
    lengths = store.lengths
    shortest, median, longest = np.percentile(lengths, [0, 50, 100])
    return {
        "records": manifest.num_records,
        "residues": manifest.num_residues,
        "lengths": {
            "min": int(shortest),
            "median": float(median),
            "mean": round(float(lengths.mean(dtype=np.float64)), 2),
            "max": int(longest),
            "histogram": [{"from": a, "to": b, "records": n} for a, b, n in _histogram(lengths)],
        },
        "composition": _composition(store),
        "alphabet": manifest.alphabet,
        "format_version": manifest.format_version,
        "engine": manifest.engine,
        "data_bytes": manifest.data_bytes,
        "blocks": manifest.num_blocks,
        "checksum": manifest.checksum,
        "created": manifest.created,
        "ingest": manifest.ingest.model_dump(),
        "counts": manifest.counts.model_dump(),
        "source": manifest.model_dump(mode="json")["source"],
    }


def describe_labels(labelled: LabelledStore) -> dict[str, Any]:
    """Kind, records of each part, and of classes how many records of each part have them."""
    space = labelled.label_space
    parts = {"training": labelled.training, "validation": labelled.validation, "test": labelled.test}
    described: dict[str, Any] = {"kind": space.kind, "names": list(space.names)}
    described["parts"] = {name: int(records.size) for name, records in parts.items()}
    if space.kind in ("multiclass", "binary"):
        counted = {n: np.bincount(labelled.targets[r], minlength=len(space.names)) for n, r in parts.items()}
        described["classes"] = {
            name: {part: int(numbers[index]) for part, numbers in counted.items()}
            for index, name in enumerate(space.names)
        }
    return described


def _histogram(lengths: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """(from, to, records) of bins from their first length up to, but not including, their last; no empty ends."""
    edges = np.array([*_BIN_EDGES, max(int(lengths.max()) + 1, _BIN_EDGES[-1] + 1)])
    numbers, _ = np.histogram(lengths, bins=edges)
    filled = np.flatnonzero(numbers)
    for index in range(filled[0], filled[-1] + 1):
        yield int(edges[index]), int(edges[index + 1]), int(numbers[index])


def _composition(store: Store) -> dict[str, int]:
    """Residues of each letter, most frequent first; letters that do not occur are left out."""
    numbers = np.zeros(256, dtype=np.int64)
    for residues in store.residue_blocks():
        numbers += np.bincount(residues, minlength=256)
    return {chr(code): int(numbers[code]) for code in np.argsort(-numbers, kind="stable") if numbers[code]}


def _report(name: str, store: Store, counts: IngestCounts, facts: dict[str, Any]) -> RenderableType:
    manifest, lengths = store.manifest, facts["lengths"]
    overview = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    rows = [
        ("store", name),
        ("records", f"{manifest.num_records:,}"),
        ("residues", f"{manifest.num_residues:,}"),
        (
            "lengths",
            f"{lengths['min']:,} to {lengths['max']:,}, median {lengths['median']:,g}, mean {lengths['mean']:,g}",
        ),
        ("alphabet", manifest.alphabet),
        ("format", f"version {manifest.format_version}, {manifest.engine}, {counted(manifest.num_blocks, 'block{s}')}"),
        ("size", f"{manifest.data_bytes / 1e6:,.1f} MB"),
        ("checksum", manifest.checksum),
        ("created", manifest.created),
        ("source", _source(store)),
        ("ingest", "\n".join(count_lines(counts))),
        ("verified", "every byte" if facts["verified"] == "full" else "manifest, size and index (--verify reads all)"),
    ]
    for label, value in rows:
        overview.add_row(f"[bold]{label}[/bold]", escape(value))
    histogram = _bars(
        "length in residues",
        [(f"{bar['from']:,} to {bar['to'] - 1:,}", bar["records"]) for bar in lengths["histogram"]],
        manifest.num_records,
    )
    composition = _bars("residue", list(facts["composition"].items()), manifest.num_residues)
    parts: list[RenderableType] = [overview, Text(), histogram, Text(), composition]
    if "labels" in facts:
        parts += [Text(), _label_table(facts["labels"])]
    return Group(*parts)


def _label_table(labels: dict[str, Any]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column(labels["kind"])
    for part in labels["parts"]:
        table.add_column(part, justify="right")
    table.add_row("all", *(f"{number:,}" for number in labels["parts"].values()))
    for name, numbers in labels.get("classes", {}).items():
        table.add_row(escape(name), *(f"{number:,}" for number in numbers.values()))
    return table


def _bars(title: str, rows: list[tuple[str, int]], total: int) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column(title, justify="right")
    table.add_column("number", justify="right")
    table.add_column("share", justify="right")
    table.add_column("")
    largest = max(number for _, number in rows)
    for label, number in rows:
        bar = "█" * round(_BAR_WIDTH * number / largest)
        table.add_row(label, f"{number:,}", f"{100 * number / total:.2f} %", bar)
    return table


def _source(store: Store) -> str:
    source = store.manifest.source
    if isinstance(source, SampleSource):
        families = counted(source.families, "famil{ies}")
        return f"embedded sample: {counted(source.records, 'record{s}')}, {families}, seed {source.seed}"
    shown = [f"{file.path} ({file.bytes / 1e6:,.1f} MB)" for file in source[:5]]
    more = [f"and {counted(len(source) - 5, 'more file{s}')}"] if len(source) > 5 else []
    return "\n".join([*shown, *more])
