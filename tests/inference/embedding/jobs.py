"""Small embedding jobs, and readers of their outputs."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from esmeray.dataset.embeddings.reader import read_embeddings
from esmeray.dataset.tokens.model_folder import quiet_transformers
from esmeray.inference.embedding.section import EmbedJobSection
from esmeray.inference.embedding.shard_files import ShardFiles
from esmeray.inference.embedding.worker import ShardWorker
from tests.dataset.tokenizer_folders import esm
from tests.model.small_models import save_small_model
from tests.model.support import random_sequences

LENGTHS = [5, 40, 12, 40, 1, 77, 30, 9, 21, 33, 16, 8]


def write_proteins(path: Path, sequences: list[str], ids: list[str] | None = None) -> Path:
    names = ids or [f"P{number:05d}" for number in range(len(sequences))]
    path.write_text("".join(f">{name}\n{sequence}\n" for name, sequence in zip(names, sequences, strict=True)))
    return path


def small_model_folder(folder: Path) -> Path:
    with quiet_transformers():
        save_small_model(esm(folder), "esm", vocab_size=33)
    return folder


def request(folder: Path, *, sequences: list[str] | None = None, **more: Any) -> EmbedJobSection:
    """A job of twelve proteins in about six shards."""
    model, fasta = folder / "model", folder / "proteins.fasta"
    if not model.exists():
        small_model_folder(model)
    if not fasta.exists():
        write_proteins(fasta, sequences or random_sequences(LENGTHS))
    settings: dict[str, Any] = {"models": str(model), "input": str(fasta), "output": folder / "out", "device": "cpu"}
    settings |= {"precision": "fp32", "tokens": 64, "shard_tokens": 64}
    return EmbedJobSection(**settings | more)


def replace(job: EmbedJobSection, **changes: Any) -> EmbedJobSection:
    return job.model_copy(update=changes)


def partial(job: EmbedJobSection) -> Path:
    """Folder of the unfinished job."""
    return job.output.with_name(f"{job.output.name}.partial")


def final_bytes(folder: Path) -> dict[str, bytes]:
    """Bytes of all files except the log, the report and the manifest with their checksums."""
    left_out = ("embedding_performance_report_cpu.json", "esmeray.json")
    files = [path for path in folder.rglob("*") if path.is_file() and path.name not in left_out]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files if path.parent.name != "logs"}


def vectors(folder: Path | str, output: str | None = None) -> dict[str, Any]:
    opened = read_embeddings(folder, output)
    return dict(zip(opened.ids, opened, strict=True))


@contextmanager
def computed_shards() -> Iterator[list[int]]:
    """Collect the numbers of the shards that the block computes."""
    computed: list[int] = []
    compute = ShardWorker.compute

    def counted(self: ShardWorker, shard: Any, *rest: Any) -> Any:
        computed.append(shard.number)
        return compute(self, shard, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShardWorker, "compute", counted)
        yield computed


@contextmanager
def stopped_after(shards: int) -> Iterator[list[int]]:
    """Interrupt the block after a number of shards; collect the numbers of the shards that it computes."""
    write = ShardFiles.write

    def killed(self: ShardFiles, *given: Any) -> Any:
        if shards == len(list(self.folder.glob("rows/*"))):
            raise KeyboardInterrupt
        return write(self, *given)

    with computed_shards() as computed, pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(ShardFiles, "write", killed)
        yield computed
