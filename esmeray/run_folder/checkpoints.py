"""Checkpoints on disk: listing, verifying and pruning.

    checkpoints/
        step-00000015/           complete: renamed to its final name as the last step
            manifest.json        position, config, store and each rank's files with size and SHA-256
            deepspeed/...        the shards, written by DeepSpeed
            label_mappings.json, tokenizer/...   of a classifier: the meaning of its outputs and tokens
        step-00000020.partial/   being written, or left by a process that was killed
        latest                   name of the newest complete checkpoint, for people and other tools

A run resumes from the newest folder whose manifest and files are intact. Neither Ray nor ``latest`` decides this.
Checkpoints are written by :mod:`esmeray.training.checkpoints.writer`.
"""

import hashlib
import json
import platform
import re
import shutil
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ValidationError

from esmeray.common.errors import CheckpointError
from esmeray.common.publishing import inner_name, write_atomically
from esmeray.run_folder.metrics_log import RecordTail
from esmeray.run_folder.paths import LATEST, RunFolder
from esmeray.train_config.removed import stored_in
from esmeray.train_config.section import Settings

FORMAT_VERSION: Literal[2] = 2
PARTIAL_SUFFIX = ".partial"
MANIFEST = "manifest.json"
MODEL_FILE, OPTIMIZER_FILE = "model_states.pt", "optim_states.pt"
"""Suffixes of the file names that DeepSpeed gives the shards."""

PACKAGES = ("torch", "ray", "deepspeed", "transformers", "lmdb", "numpy")
_NAME = re.compile(r"step-\d{8,}")


class FileEntry(BaseModel, extra="forbid", frozen=True):
    """One file of a checkpoint; ``name`` is relative to its folder."""

    name: Annotated[str, AfterValidator(inner_name)]
    size_bytes: int
    sha256: str


class Position(BaseModel, extra="forbid", frozen=True):
    """Progress of training: the next step."""

    step: int = 0
    epoch: int = 0
    step_in_epoch: int = 0
    tokens_seen: int = 0
    skipped_steps: int = 0
    nonfinite_in_a_row: int = 0


class Manifest(BaseModel, extra="forbid", frozen=True):
    """Contents of a checkpoint. Written last; its own digest detects damage."""

    format_version: Literal[2] = FORMAT_VERSION
    position: Position
    world_size: int
    seed: int
    store_checksum: str
    wandb_run_id: str | None
    validation_cost: float | None
    config: dict
    versions: dict[str, str]
    created: str
    files: dict[int, list[FileEntry]]
    digest: str = ""

    def sealed(self) -> "Manifest":
        # Keys are sorted, since their order is not part of the content.
        content = self.model_dump(mode="json", exclude={"digest"})
        digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
        return self.model_copy(update={"digest": digest})


@dataclass(frozen=True)
class CheckpointFolder:
    """One complete checkpoint."""

    path: Path

    @property
    def step(self) -> int:
        return int(self.path.name.removeprefix("step-"))

    def manifest(self) -> Manifest:
        """Read the manifest. Raises CheckpointError if it is missing, of another version, or does not match its
        digest."""
        path = self.path / MANIFEST
        try:
            manifest = Manifest.model_validate_json(path.read_bytes())
        except FileNotFoundError as error:
            raise CheckpointError(f"{self.path}: no {MANIFEST}") from error
        except ValidationError as error:
            raise CheckpointError(
                f"{path}: damaged, or not of format version {FORMAT_VERSION} ({_first(error)}): resume with the "
                "version of Esmeray that wrote it, or restart with another run.name"
            ) from error
        if manifest.digest != manifest.sealed().digest:
            raise CheckpointError(f"{path}: damaged (checksum mismatch)")
        return manifest

    def settings(self, schema: type[Settings]) -> Settings:
        """Return the config that the checkpoint was written with. Raises CheckpointError if this version can't read
        it."""
        try:
            return schema.model_validate(self.manifest().config, context=stored_in(self.path / MANIFEST))
        except ValidationError as error:
            raise CheckpointError(
                f"{self.path / MANIFEST}: its config can't be read ({_first(error)}): "
                "export it with the version of Esmeray that wrote it"
            ) from error

    def verify(self, ranks: Iterable[int] | None = None) -> Manifest:
        """Check size and SHA-256 of these ranks' files (default: all) without unpickling. Raises CheckpointError."""
        manifest = self.manifest()
        for rank in manifest.files if ranks is None else ranks:
            for entry in manifest.files.get(rank, []):
                path = self.path / entry.name
                # Compare the size first: a truncated file need not be read.
                if not path.exists():
                    raise CheckpointError(f"{path}: missing")
                if path.stat().st_size != entry.size_bytes or sha256_of(path) != entry.sha256:
                    raise CheckpointError(f"{path}: damaged (size or SHA-256 differs from the manifest)")
        return manifest


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclass(frozen=True)
class CheckpointStore:
    """The checkpoints of one run."""

    root: Path

    def complete(self) -> list[CheckpointFolder]:
        """Return folders with a final name, newest first. They may still be damaged."""
        folders = [path for path in self.root.glob("step-*") if _NAME.fullmatch(path.name) and path.is_dir()]
        return [CheckpointFolder(path) for path in sorted(folders, key=lambda path: path.name, reverse=True)]

    def folder(self, step: int) -> CheckpointFolder:
        """Return the folder of a step, whether or not it exists."""
        return CheckpointFolder(self.root / f"step-{step:08d}")

    def newest_intact(self) -> CheckpointFolder | None:
        """Return the newest complete checkpoint whose manifest can be read. Its other files are not checked."""
        for folder in self.complete():
            with suppress(CheckpointError):
                folder.manifest()
                return folder
        return None

    def write_latest(self, folder: CheckpointFolder) -> None:
        """Point ``latest`` at this checkpoint, by an atomic rename."""
        write_atomically(self.root / LATEST, folder.path.name + "\n")

    def sweep(self) -> None:
        """Remove half-written checkpoints of killed processes."""
        for path in self.root.glob(f"step-{'[0-9]' * 8}*{PARTIAL_SUFFIX}"):
            shutil.rmtree(path, ignore_errors=True)

    def discard_after(self, step: int) -> None:
        """Move aside folders newer than the checkpoint resumed from: they were unusable, and their names are needed."""
        newer = [folder for folder in self.complete() if folder.step > step]
        if newer:  # keep one generation for inspection, since each is as large as a checkpoint
            for old in self.root.glob("damaged-step-*"):
                shutil.rmtree(old)
        for folder in newer:
            folder.path.rename(folder.path.with_name(f"damaged-{folder.path.name}"))

    def best(self) -> CheckpointFolder | None:
        """Return the complete checkpoint with the lowest validation cost, or the newest if none was validated."""
        return next(iter([*self._ranked(), *self.complete()]), None)

    def prune(self, keep_last: int, keep_step: int | None) -> None:
        """Delete all but the newest ``keep_last``, the one with the lowest validation cost, and ``keep_step``."""
        folders = self.complete()
        kept = {folder.step for folder in folders[:keep_last] + self._ranked()[:1]} | {keep_step}
        for folder in folders:
            if folder.step not in kept:
                # The manifest goes first, so that a reader never accepts a half-deleted folder as a checkpoint.
                (folder.path / MANIFEST).unlink(missing_ok=True)
                shutil.rmtree(folder.path)

    def _ranked(self) -> list[CheckpointFolder]:
        """Return complete, validated checkpoints by validation cost, lowest first; equal costs by step."""
        scored = []
        for folder in self.complete():
            with suppress(CheckpointError):
                if (cost := folder.manifest().validation_cost) is not None:
                    scored.append((cost, folder.step))
        return [self.folder(step) for _, step in sorted(scored)]


def saved_steps(run: RunFolder) -> tuple[int, str]:
    """Return the newest checkpoint's step (0 without one), and a message about the steps that an interrupted run
    saved."""
    newest = CheckpointStore(run.checkpoints).newest_intact()
    step = newest.step if newest else 0
    taken = max(
        (
            record["step"]
            for record in RecordTail(run.metrics, recent_bytes=1 << 20).poll()
            if record["kind"] == "train"
        ),
        default=0,
    )
    return step, f"saved up to step {step} of {max(step, taken)}; the same command resumes it"


def installed_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that training depends on."""
    # From package metadata, since importing torch and DeepSpeed takes seconds.
    return {"python": platform.python_version()} | {package: version(package) for package in PACKAGES}


def _first(error: ValidationError) -> str:
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"


def check_data(run: RunFolder, sources: list[str], checksum: str) -> None:
    """Raise CheckpointError if the newest checkpoint was trained on a store with another checksum."""
    # Compare checksums, not paths: the same data may have moved, and a path may contain other data now.
    folder = CheckpointStore(run.checkpoints).newest_intact()
    if folder is None or (earlier := folder.manifest()).store_checksum == checksum:
        return
    before, now = ", ".join(earlier.config["data"]["source"]), ", ".join(sources)
    raise CheckpointError(
        f"data.source: the run {run.path.name} was trained on {before} (checksum "
        f"{earlier.store_checksum[:12]}), not on {'its current version' if now == before else now} (checksum "
        f"{checksum[:12]}): restore the earlier data, or choose another run.name"
    )
