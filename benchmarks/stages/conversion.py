"""FASTA to store, beside one pickled ``put`` a record, and beside ``cp``.

The file is real proteins repeated under ids of their own, uncompressed, in the page cache, and so large (200,000
records) that opening and closing don't count. The peer is what a user of TAPE or ProteinNet writes: pyfastx parses,
and each record goes into LMDB as a pickled dictionary, all in one transaction. It neither checks a residue nor an id;
ours does, and hashes, checksums and syncs. ``cp`` of the same file is the limit that any conversion has; since it
leaves its bytes in the page cache where a store is on the disk when it is done, ``cp`` followed by ``sync`` is shown
as well. Peak memory is taken in fresh processes, at the file's size and at four times it.
"""

import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from benchmarks.harness.proteins import Proteins, make_store, read_proteins, write_fasta, write_store
from benchmarks.harness.stage import Case, Comparison, Contender, Facts, Setting, Stage, WrongWorkError
from benchmarks.peers.pickle_lmdb import PickleDataset, convert_fasta
from benchmarks.programs.processes import peak_of
from esmeray.dataset.store.reader import Store

RECORDS, QUICK_RECORDS = 200_000, 10_000
CHECKED_RECORDS = 10_000
TIMES_LARGER = 4

OURS = "esmeray"
PEER = "pyfastx, pickle, put"
COPY = "cp"
COPY_AND_SYNC = "cp, then sync"
ONCE, LARGER = "esmeray, the file", f"esmeray, {TIMES_LARGER} times the file"
PEER_LARGER = f"{PEER}, {TIMES_LARGER} times the file"


def _cases(setting: Setting) -> Iterator[Case]:
    proteins = read_proteins(setting.fasta)
    folder = setting.folder
    records = QUICK_RECORDS if setting.quick else RECORDS
    fasta = folder / "proteins.fasta"
    setting.note(f"writing {records:,} records")
    file_mb = write_fasta(fasta, proteins.sequences, records) / 1e6
    facts: Facts = {**proteins.facts, "records": records, "file in MB": round(file_mb, 1)}

    # Each removes what it wrote before it writes again, untimed: deleting is no part of a conversion.
    def contender(name: str, target: Path, work: Callable[[Path, Path], object]) -> Contender:
        def run() -> float:
            work(fasta, target)
            return file_mb

        return Contender(name, run, before=partial(_remove, target))

    ways = (
        contender(OURS, folder / "store", make_store),
        contender(PEER, folder / "pickles", convert_fasta),
        contender(COPY, folder / "copy.fasta", _copy),
        contender(COPY_AND_SYNC, folder / "copy.fasta", _copy_and_sync),
    )
    # Of FASTA, not of what is written: the peer's pickles are larger than our store.
    yield Case("throughput", "MB/s of FASTA", ways, check=partial(_check, folder / "checked", proteins), facts=facts)

    setting.note(f"writing {TIMES_LARGER * records:,} records")
    larger = folder / "larger.fasta"
    larger_mb = write_fasta(larger, proteins.sequences, TIMES_LARGER * records) / 1e6
    target = folder / "measured"

    # With the libraries: a conversion needs them, and the peer's are fewer.
    def peak(work: Callable[..., object], fasta: Path) -> float:
        return peak_of(f"{work.__module__}:{work.__name__}", fasta=str(fasta), target=str(target)).total_bytes / 1e6

    measured = ((ONCE, make_store, fasta), (LARGER, make_store, larger), (PEER_LARGER, convert_fasta, larger))
    measuring = tuple(
        Contender(name, partial(peak, work, path), "value", before=partial(_remove, target))
        for name, work, path in measured
    )
    facts = {**facts, "larger file in MB": round(larger_mb, 1)}
    yield Case("peak memory", "MB", measuring, better="lower", rounds=3, facts=facts)


def _copy(source: Path, target: Path) -> None:
    subprocess.run(["cp", str(source), str(target)], check=True)


# As a store is when it is done: what lies in the page cache alone is lost with the machine.
def _copy_and_sync(source: Path, target: Path) -> None:
    _copy(source, target)
    subprocess.run(["sync", str(target)], check=True)


def _remove(path: Path) -> None:
    # A store and the peer's LMDB are folders, a copy is a file.
    subprocess.run(["rm", "-rf", str(path)], check=True)


def _check(folder: Path, proteins: Proteins) -> Facts:
    """Both hold the same records."""
    store = Store(write_store(folder, proteins.sequences, CHECKED_RECORDS))
    convert_fasta(folder / "proteins.fasta", folder / "pickles")
    pickles = PickleDataset(folder / "pickles")
    theirs = [(item["id"], item["primary"]) for item in map(pickles.__getitem__, range(len(pickles)))]
    ours = [(store.id(index), store.sequence(index).tobytes().decode()) for index in range(len(store))]
    if ours != theirs:
        raise WrongWorkError("the store and the LMDB of pickles hold different records")
    return {"records checked to be equal": len(ours)}


STAGE = Stage(
    name="conversion",
    summary="FASTA to store, beside pyfastx + pickle + one put a record, and beside cp",
    cases=_cases,
    comparisons=(
        Comparison("throughput", OURS, PEER, {"cpu": 4.0, "cuda": 4.0}),
        Comparison("throughput", OURS, COPY, {"cpu": 0.6, "cuda": 0.6}),
        Comparison("throughput", OURS, COPY_AND_SYNC),
        Comparison("peak memory", LARGER, ONCE, {"cpu": 0.8, "cuda": 0.8}, "peak memory, flat in the file's size"),
        Comparison("peak memory", LARGER, PEER_LARGER),
    ),
    packages=("pyfastx",),
    distributions=("lmdb", "pyfastx"),
)
