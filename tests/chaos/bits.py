"""Flipped bits in files that Esmeray wrote: the reading command reports one line of damage, or the flip is harmless.

Each artifact (a store, an export, an unfinished job ...) is created once. Each flip takes three steps:

1. The artifact is copied back to its original path.
2. One bit of one of its files is flipped, before the command that reads it starts or while it runs.
3. The output and the files of the command are compared with the undisturbed command's.

Every command is a fork of this process, which has imported the modules, but has never computed or opened a store:
threads and LMDB do not survive a fork.
"""

import hashlib
import os
import random
import re
import shutil
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch.distributed as dist

from esmeray.cluster.collective import WorkerContext
from esmeray.common import remote
from esmeray.common.publishing import write_atomically
from esmeray.dataset.embeddings.manifest import read_manifest
from esmeray.dataset.embeddings.reader import read_embeddings
from esmeray.dataset.store.conversion import ensure_store
from esmeray.dataset.structures.predictions import Predicted, PredictedStructures, keep, keys
from esmeray.dataset.structures.store import StructureStore
from esmeray.inference.embedding.shard_files import ShardFiles
from esmeray.inference.function import prediction
from esmeray.inference.mutations import job as mutations_job
from esmeray.run_folder.job import Journal
from esmeray.train_config.loading import dump_config
from esmeray.training.loop.worker import train_worker
from tests.chaos.forks import LIMIT_S, Call, command, ended
from tests.chaos.observed import wrap
from tests.classifiers import export_tiny
from tests.conftest import REPOSITORY
from tests.dataset.tokenizer_folders import esm
from tests.inference.embedding.jobs import LENGTHS, final_bytes, small_model_folder, write_proteins
from tests.model.small_models import save_masked_lm
from tests.model.support import random_sequences
from tests.runs import run_folder, tiny_config
from tests.structures import folds, structure_store

MAKING_S = 900


def killed(owner: Any, method: str, calls: int, words: str) -> Call:
    """Return a call that runs the command and kills it at the end of the n-th call of a method."""

    def call() -> None:
        at_call(owner, method, calls, lambda: os._exit(0))
        command(words)()
        raise AssertionError("the command ended before it could be killed")

    return call


def at_call(owner: Any, method: str, calls: int, act: Call) -> None:
    """Call ``act`` in this process at the end of the n-th call of a method."""
    done = Counter[str]()

    def count(*_: Any) -> None:
        done["calls"] += 1
        if done["calls"] == calls:
            act()

    wrap(owner, method, lambda: None, count)


@dataclass(frozen=True)
class Thing:
    """An artifact: how it is created and read.

    Attributes:
        make: calls that create it, in a folder of its own.
        read: call that reads it, in the same folder; its printed output counts as its result.
        flips: glob pattern of the files whose bits are flipped.
        results: glob pattern of the files that are compared.
        moments: a method of the reading process, and how many of its calls count: the bit is flipped at the end of a
            random one of these calls, or before the process starts to read.
    """

    make: tuple[Call, ...]
    read: Call
    flips: str
    results: str = "stdout.txt"
    moments: tuple[Any, str, int] | None = None


EMBED = (
    "embed run --embed.models {} --embed.input proteins.fasta --embed.device cpu --embed.precision fp32 "
    "--embed.tokens 64 --embed.shard_tokens 64 --embed.output {} "
)
FEW = "--data.sample.records 60 --data.sample.families 12 --training.epochs 4 --training.warmup_steps 0 "
FUNCTION = (
    f"train --config {REPOSITORY / 'train_config/function.yaml'} --run.storage_path runs {FEW}--wandb.mode disabled "
    "--model.classifier.hidden_size 16 --data.terms.min_count 3 --batch.batch_size 16 --checkpoint.every_steps 4 "
    "--training.evaluate_every_steps 4"
)
PREDICT = (
    "function predict runs/function --predict.input runs/function/function/sample/test.fasta --predict.output t.tsv"
)
ALIGN = "align --align.queries proteins.fasta --align.store store --align.output hits.tsv --align.evalue inf"
SCAN = "mutations scan model --scan.sequence wild.fasta --scan.output scan --scan.precision fp32 --scan.device cpu"


def small_pieces() -> None:
    mutations_job.PIECE_TOKENS, prediction._BLOCK = 30, 4


def inputs() -> None:
    small_model_folder(Path("model"))
    write_proteins(Path("proteins.fasta"), random_sequences(LENGTHS))


def masked_model() -> None:
    save_masked_lm(esm(Path("model")), "esm", vocab_size=33)
    write_proteins(Path("wild.fasta"), random_sequences([20]))


def train(stop_at: int | None = None) -> int:
    """Start or resume a run of eight steps with a checkpoint every two steps; ``stop_at``: step to stop after.

    Returns the exit code of a run that failed, as the driver does, otherwise 0.
    """
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    config = tiny_config(Path.cwd(), model={"task": "masked_lm"}, checkpoint={"every_steps": 2, "keep_last": 3})
    run, store = run_folder(config), str(ensure_store(config.data, Path.cwd()))
    run.path.mkdir(exist_ok=True)
    write_atomically(run.config, dump_config(config))  # the driver does this otherwise
    run.clear_requests()
    stop = WorkerContext(report=lambda metrics: run.stop_request.touch() if metrics["step"] == stop_at else None)
    train_worker(config, stop if stop_at else WorkerContext(), store)
    outcome = run.read_outcome()
    if outcome is None or outcome.status != "failed":
        return 0
    print(f"error: {outcome.message}", file=sys.stderr)
    return outcome.exit_code


def digest(values: Any) -> str:
    return hashlib.sha256(np.asarray(values).tobytes()).hexdigest()


def read_all(address: str = "out") -> None:
    """Print every value of every output of embeddings."""
    for name in read_manifest(remote.local_path(address), remote.uri_of(address)).outputs:
        embeddings = read_embeddings(address, name)
        for record_id, values in zip(embeddings.ids, embeddings, strict=True):
            print(name, record_id, digest(values))


def read_structures() -> None:
    store = StructureStore("structures")
    for record, length in enumerate(store.store.lengths.tolist()):
        print(store.store.text(record), *map(digest, store.atoms(record, 0, length)))


def predicted() -> None:
    structures = folds(4)
    keep(
        Path("cache/fold"),
        [s.residues for s in structures],
        [Predicted(s.coordinates, s.confidence) for s in structures],
    )


def read_predicted() -> None:
    opened = PredictedStructures("cache")
    for structure in folds(4):
        print(*map(digest, opened.of(keys([structure.residues]))))


CONVERTED = (inputs, command("data convert --data.source proteins.fasta --convert.store store"))
JOB, CACHED = EMBED.format("model", "out"), "--embed.cache cache"
INT8 = "--embed.weights int8 --storage.cache_folder copies"
BOTH = "--embed.outputs mean residues"
EMBEDDED = {
    "embeddings, Parquet": f"{BOTH} --embed.format parquet",
    "embeddings, .npy": f"{BOTH} --embed.format npy --embed.dtype fp16",
    "embeddings, HDF5": f"{BOTH} --embed.format hdf5",
    "embeddings, int8": f"{BOTH} --embed.format parquet --embed.dtype int8",
}
THINGS = {name: Thing((inputs, command(JOB + more)), read_all, "out") for name, more in EMBEDDED.items()} | {
    **{
        f"index, {kind}": Thing(
            (inputs, command(JOB), command(f"embed index out --index.output i --index.kind {kind}")),
            command("embed search i --search.queries out --search.output hits.tsv"),
            "i",
            "hits.tsv",
        )
        for kind in ("exact", "compressed")
    },
    "store": Thing(CONVERTED, command(ALIGN), "store", "hits.tsv"),
    "store, read whole": Thing(CONVERTED, command("data inspect store --verify"), "store"),
    "structure store": Thing((lambda: structure_store(Path("structures"), 4),), read_structures, "structures"),
    "predicted structures": Thing((predicted,), read_predicted, "cache"),
    "unfinished embedding job": Thing(
        (inputs, killed(ShardFiles, "write", 3, JOB + BOTH)),
        command(JOB + BOTH),
        "out.partial",
        "out",
        (ShardFiles, "write", 3),
    ),
    "feature cache": Thing(
        (inputs, command(EMBED.format("model", "first") + CACHED), lambda: shutil.rmtree("first")),
        command(JOB + CACHED),
        "cache",
        "out",
    ),
    "weights of 8 bits": Thing(
        (inputs, command(EMBED.format("model", "first") + INT8), lambda: shutil.rmtree("first")),
        command(JOB + INT8),
        "copies",
        "out",
    ),
    "unfinished alignment": Thing(
        (*CONVERTED, killed(Journal, "add", 3, ALIGN)),
        command(ALIGN),
        "hits.tsv.partial",
        "hits.tsv",
        (Journal, "add", 9),
    ),
    "unfinished scan of mutants": Thing(
        (masked_model, killed(Journal, "add", 3, SCAN)),
        command(SCAN),
        "scan.partial",
        "scan/*.csv",
        (Journal, "add", 17),
    ),
    "unfinished prediction of functions": Thing(
        (command(FUNCTION), killed(Journal, "add", 1, PREDICT)),
        command(PREDICT),
        "t.tsv.partial",
        "t.tsv",
        (Journal, "add", 1),
    ),
    "run of function prediction": Thing((command(FUNCTION),), command(PREDICT), "runs/function", "t.tsv"),
    "unfinished run": Thing((partial(train, 6),), train, "tiny", "tiny/export/*.safetensors"),
    "run": Thing((train,), command("train export tiny --export.output exported"), "tiny", "exported/*.safetensors"),
    "state of a run": Thing((train,), command("train status tiny"), "tiny"),
    "export": Thing(
        (inputs, train, lambda: Path("tiny/export").rename("export")),
        command(EMBED.format("export", "out")),
        "export",
        "out",
    ),
    "classifier": Thing(
        (inputs, lambda: export_tiny(Path("places"))),
        command("classify predict places --predict.input proteins.fasta --predict.output out.csv"),
        "places",
        "out.csv",
    ),
}
"""Artifacts whose bits are flipped, by name."""


class Ended(NamedTuple):
    """The end of a command: exit code, printed text, and result files by name."""

    code: int
    said: str
    results: dict[str, bytes]


class Flip(NamedTuple):
    """A flipped bit and its outcome."""

    number: int
    thing: str
    kind: str
    place: str
    outcome: str
    said: str

    @property
    def is_right(self) -> bool:
        return self.outcome in ("noticed", "harmless")

    def __str__(self) -> str:
        return f"flip {self.number}, {self.thing}, {self.place}: {self.outcome}: {self.said[-1500:].strip()}"


class Bits:
    """The artifacts, in folders of ``root``; each is created and read undisturbed once."""

    def __init__(self, root: Path, only: Iterable[str] | None = None) -> None:
        self.root, self.things = root, {name: THINGS[name] for name in only or THINGS}
        self.made = cache(self._made)

    def flip(self, seed: int, number: int) -> Flip:
        """Flip one bit, chosen by the seed and the number, and run the command."""
        chance = random.Random(f"{seed} {number}")
        name = chance.choice([*self.things])
        undisturbed, copy = self.made(name), self.root / name / "here"
        note = copy / "flipped.txt"
        act = partial(flip_bit, copy, self.things[name].flips, chance, note)
        while True:
            shutil.rmtree(copy)
            shutil.copytree(self.root / name / "kept", copy)
            ended = self._ended(self._flipping(name, act, chance), name)
            if note.exists():  # otherwise the command ended before the flip
                break
        where = note.read_text()
        judged = outcome(ended, undisturbed)
        return Flip(number, name, kind_of(where.split(", bit")[0]), where, judged, ended.said)

    def _flipping(self, name: str, act: Call, chance: random.Random) -> Call:
        """Return a call that reads an artifact, with a flip before the start or while it runs."""
        read, moments = self.things[name].read, self.things[name].moments
        moment = chance.randint(0, moments[2]) if moments else 0

        def call() -> Any:
            if moments and moment:
                at_call(*moments[:2], moment, act)
            else:
                act()
            return read()

        return call

    def _made(self, name: str) -> Ended:
        """Create an artifact and read it undisturbed."""
        (self.root / name / "here").mkdir(parents=True)
        for call in self.things[name].make:
            code, said, _ = self._ended(call, name, MAKING_S)
            assert code == 0, said
        shutil.copytree(self.root / name / "here", self.root / name / "kept")
        ended = self._ended(self.things[name].read, name)
        assert ended.code == 0 and ended.results, ended.said
        return ended

    def _ended(self, call: Call, name: str, limit_s: int = LIMIT_S) -> Ended:
        """Run a call in a fork, in the artifact's folder."""
        copy, pattern = self.root / name / "here", self.things[name].results
        files = [self.root / name / file for file in ("stdout.txt", "stderr.txt")]
        code = ended(lambda: (small_pieces(), call())[1], copy, limit_s, *files)
        results = {}
        for path in [*copy.glob(pattern), *(files[:1] if pattern == "stdout.txt" else ())]:
            results |= final_bytes(path) if path.is_dir() else {path.name: path.read_bytes()}
        said = files if pattern == "stdout.txt" else files[1:]  # `train status` reports damage on stdout
        return Ended(code, "".join(file.read_text(errors="replace") for file in said), results)


def flip_bit(folder: Path, pattern: str, chance: random.Random, note: Path) -> None:
    """Flip a bit of a file below ``pattern``; each kind of file has the same probability."""
    kinds: dict[str, list[Path]] = {}
    for path in sorted(folder.glob(f"{pattern}/**/*")):
        if path.is_file() and path.stat().st_size:
            kinds.setdefault(kind_of(str(path.relative_to(folder))), []).append(path)
    if kinds:
        path = chance.choice(kinds[chance.choice([*kinds])])
        content = bytearray(path.read_bytes())
        bit = chance.randrange(8 * len(content))
        content[bit // 8] ^= 1 << bit % 8
        with path.open("r+b") as file:  # in place, as on a disk: processes that have the file open see it
            file.write(content)
        note.write_text(f"{path.relative_to(folder)}, bit {bit % 8} of byte {bit // 8} of {len(content)}")


def kind_of(path: str) -> str:
    return re.sub(r"\d[\d-]*|[0-9a-f]{12,}", "N", path)


def outcome(ended: Ended, undisturbed: Ended) -> str:
    lines = set(ended.said.splitlines()) - set(undisturbed.said.splitlines())
    if ended.code < 0 or "Traceback" in ended.said:
        return "traceback" if ended.code >= 0 else f"killed by signal {-ended.code}"
    if ended.code == 0 and ended.results == undisturbed.results:
        return "harmless"
    if ended.code == 0:
        return "noticed" if any("damaged" in line for line in lines) else "silent"
    return "noticed" if len(lines) == 1 and lines.pop().startswith("error: ") else "more than one line"


def table(flips: Iterable[Flip]) -> Iterator[str]:
    """Yield a Markdown table with a row per kind of file, and a row for all."""
    rows: dict[tuple[str, str], Counter[str]] = {}
    for flip in flips:
        for row in ((flip.thing, flip.kind), ("all", "")):
            rows.setdefault(row, Counter()).update([flip.outcome, "flips"])
    columns = ["flips", "noticed", "harmless", *sorted({*rows["all", ""]} - {"flips", "noticed", "harmless"})]
    yield f"| bits of | file | {' | '.join(columns)} |"
    yield "|---" * (2 + len(columns)) + "|"
    for (thing, kind), counts in sorted(rows.items()):
        yield f"| {thing} | {kind} | {' | '.join(str(counts[column]) for column in columns)} |"
