"""Commands that ``operations.py`` disturbs: their inputs, the command, and a reader of the output.

Each command that writes files has a case in ``GROUPS``.
"""

import importlib
import random
import shutil
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from esmeray.common import remote
from esmeray.common.errors import read_json, reading
from esmeray.common.publishing import MADE_FILE, file_xxh128
from tests.chaos.forks import Call, command

BUCKET = "bucket"
AMINO_ACIDS = "ACDEFGHIKLMNPQRSTVWY"


class Case(NamedTuple):
    """A command with its preparation and its reader.

    Attributes:
        make: commands and calls that prepare the folder.
        run: the command. ``{folder}`` is the folder.
        read: verifies and prints the output, or ends with an error.
        is_staged: the last word that ``read`` prints is a stage, which may lie between the old and the new one.
        is_worker: the command is a worker without its driver, which would report the error in one line.
        on_s3: the output is in the bucket.
    """

    make: tuple[str | Call, ...]
    run: str | Call
    read: str | Call
    is_staged: bool = False
    is_worker: bool = False
    on_s3: bool = False


def called(work: str | Call) -> Call:
    return work if callable(work) else lambda: command(work.format(folder=Path.cwd()))()


def bits(name: str, *given: Any) -> Call:
    """Return a call of a function or command of tests/chaos/bits.py, imported late: its imports take seconds."""

    def call() -> Any:
        module = importlib.import_module("tests.chaos.bits")
        module.small_pieces()
        named = getattr(module, name)
        return command(named)() if isinstance(named, str) else named(*given)

    return call


def write_fasta(name: str, count: int) -> None:
    """Write ``count`` proteins; the sequence is drawn with the protein's number as the seed."""
    draws = [random.Random(number) for number in range(count)]
    sequences = ["".join(draw.choices(AMINO_ACIDS, k=draw.randint(5, 60))) for draw in draws]
    Path(name).write_text("".join(f">P{number:05d}\n{text}\n" for number, text in enumerate(sequences)))


def read_text(name: str) -> None:
    with reading(name):
        print(Path(name).read_text())


def read_vectors(output: str) -> None:
    """Print every value of the embeddings in a folder or at a URI."""
    remote.use(remote.Storage(cache_folder="cache", patience_s=1))
    bits("read_all", output.format(folder=Path.cwd()))()


def search(index: str) -> None:
    """Print the hits of all vectors in an index."""
    called(f"embed search {index} --search.queries vectors --search.output hits.tsv {CACHE}")()
    read_text("hits.tsv")


def read_folder(folder: str) -> None:
    """Verify and print the checksums in a folder's manifest."""
    for name, checksum in read_json(Path(folder) / MADE_FILE, "")["files"].items():
        is_sound = file_xxh128(Path(folder) / name) == checksum
        print(name, checksum if is_sound and not name.endswith((".md", ".json", ".png")) else is_sound)


def read_run(run: str) -> None:
    """Print the stage of a run: the step of its newest intact checkpoint, plus 1000 per complete export."""
    from esmeray.run_folder.checkpoints import CheckpointStore

    folder = CheckpointStore(Path(run) / "checkpoints").newest_intact()
    exports = [path for path in (Path(run) / "export", Path(run) / "function") if path.is_dir()]
    for path in exports:
        read_folder(str(path))
    print((0 if folder is None else folder.verify().position.step) + 1000 * len(exports))


CACHE = "--storage.cache_folder cache --storage.patience_s 1"
AT_FILE, AT_S3 = "file://{folder}/shared", f"s3://{BUCKET}"
EMBED = (
    "embed run --embed.models model --embed.input {} --embed.device cpu --embed.precision fp32 --embed.tokens 64 "
    f"--embed.shard_tokens 256 {CACHE} --embed.output "
)
FEW, ALL = EMBED.format("few.fasta"), EMBED.format("proteins.fasta")
PROTEINS = (partial(write_fasta, "few.fasta", 12), partial(write_fasta, "proteins.fasta", 24))
INPUTS = (bits("inputs"), *PROTEINS)
VECTORS = (*INPUTS, FEW + "old", ALL + "vectors", lambda: shutil.rmtree("cache", ignore_errors=True))
CONVERT = "data convert --data.source {} --convert.store store"
ALIGN = "align --align.queries proteins.fasta --align.store store --align.output hits.tsv --align.evalue inf"
FIT = "embed fit --fit.input proteins.fasta --fit.labels labels.csv --fit.output relatives"


def labels() -> None:
    Path("labels.csv").write_text("id,label\n" + "".join(f"P{number:05d},{number % 4}\n" for number in range(24)))


def structures() -> None:
    from tests.structures import folds, pdb_lines, write_pdb

    Path("pdb").mkdir()
    for number, structure in enumerate(folds(4)):
        write_pdb(Path(f"pdb/{number}.pdb"), pdb_lines(structure))


def classifier() -> None:
    from tests.classifiers import export_tiny, labelled_fasta

    export_tiny(Path("places"))
    labelled_fasta(Path("labelled.fasta"), [20] * 12)


def indexing(kind: str, output: str = "index", **more: Any) -> dict[str, Case]:
    """Cases that build, extend and replace an index."""
    build = f"embed index {{}} --index.output {output} {CACHE}"
    new = f" --index.kind {kind}"
    old = (*VECTORS, build.replace("{}", "old") + new)
    grow = build.replace("{}", "vectors")
    return {
        "built": Case(VECTORS, grow + new, partial(search, output), **more),
        "extended": Case(old, grow, partial(search, output), **more),
        "replaced": Case(old, f"{grow}{new} --overwrite", partial(search, output), **more),
    }


def embedding(output: str = "out", options: str = "", **more: Any) -> dict[str, Case]:
    """Cases that create, extend and replace embeddings."""
    old = (*INPUTS, f"{FEW}{output}{options}")
    run = f"{ALL}{output}{options}"
    return {
        "new": Case(INPUTS, run, partial(read_vectors, output), **more),
        "grown": Case(old, run, partial(read_vectors, output), **more),
        "replaced": Case(old, f"{run} --overwrite", partial(read_vectors, output), **more),
    }


GROUPS: dict[str, dict[str, Case]] = {
    "data convert": {
        "new": Case(PROTEINS, CONVERT.format("proteins.fasta"), "data inspect store --verify"),
        "replaced": Case(
            (*PROTEINS, CONVERT.format("few.fasta")),
            CONVERT.format("proteins.fasta") + " --overwrite",
            "data inspect store --verify",
        ),
    },
    "align": {
        "new": Case((*PROTEINS, CONVERT.format("proteins.fasta")), ALIGN, partial(read_text, "hits.tsv")),
        "replaced": Case(
            (*PROTEINS, CONVERT.format("proteins.fasta"), f"{ALIGN} --align.hits 3"),
            f"{ALIGN} --overwrite",
            partial(read_text, "hits.tsv"),
        ),
    },
    "embed run": embedding(),
    "embed run, residues": embedding(options=" --embed.outputs mean residues --embed.format hdf5"),
    "embed run at file://": embedding(f"{AT_FILE}/out"),
    "embed run at s3://": embedding(f"{AT_S3}/out", on_s3=True),
    "embed index, exact": indexing("exact"),
    "embed index, compressed": indexing("compressed"),
    "embed index at file://": indexing("exact", f"{AT_FILE}/index"),
    "embed index at s3://": indexing("exact", f"{AT_S3}/index", on_s3=True),
    "embed fit": {"new": Case((*PROTEINS, labels), FIT, partial(read_folder, "relatives"))},
    "data structures": {
        "new": Case(
            (structures,), "data structures --data.source pdb --structures.store structures", bits("read_structures")
        )
    },
    "classify": {
        "evaluate": Case(
            (classifier,),
            "classify evaluate places --evaluate.input labelled.fasta --evaluate.output report "
            "--data.labels.header_field 1 --evaluate.device cpu",
            partial(read_folder, "report"),
        ),
        "predict": Case(
            (classifier,),
            "classify predict places --predict.input labelled.fasta --predict.output classes.csv --predict.device cpu",
            partial(read_text, "classes.csv"),
        ),
    },
    "function": {
        "train": Case((), bits("FUNCTION"), partial(read_run, "runs/function"), is_staged=True),
        "predict": Case((bits("FUNCTION"),), bits("PREDICT"), partial(read_text, "t.tsv")),
    },
    "train": {
        "new": Case((), bits("train"), partial(read_run, "tiny"), is_staged=True, is_worker=True),
        "resumed": Case((bits("train", 4),), bits("train"), partial(read_run, "tiny"), is_staged=True, is_worker=True),
        "export": Case(
            (bits("train"),), "train export tiny --export.output exported", partial(read_folder, "exported")
        ),
    },
}
CASES = {f"{group}, {name}": case for group, cases in GROUPS.items() for name, case in cases.items()}
