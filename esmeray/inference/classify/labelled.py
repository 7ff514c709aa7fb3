"""Texts for a trained classifier, with or without targets.

Texts with targets come from a labelled file or from the run's held-out records; texts without targets come from files
to predict. Shape legend: N records, R concatenated residues of all records, C outputs.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import compress
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from esmeray.alignment.similarity import identity_clusters, nearest_identity
from esmeray.common.errors import ConfigError, DataError
from esmeray.common.progress import conversion_bar
from esmeray.dataset.fasta.reader import files_ignored
from esmeray.dataset.labels.conversion import ensure_labelled_store
from esmeray.dataset.labels.label_space import LabelSpace
from esmeray.dataset.labels.labelled_file import (
    LabelledCounts,
    LabelledRecords,
    find_labelled_files,
    is_labelled_name,
    read_labelled,
)
from esmeray.dataset.labels.parts import LabelledSource
from esmeray.dataset.labels.store import MANIFEST_FILE, LabelledStore
from esmeray.dataset.section import DataSection, IngestSection, LabelsSection, Part, SampleSection, TokenizerSection
from esmeray.dataset.store.conversion import SAMPLE
from esmeray.dataset.store.ingest import Ingest
from esmeray.dataset.targets import has_target
from esmeray.run_folder.checkpoints import CheckpointStore, check_data
from esmeray.run_folder.paths import RunFolder
from esmeray.run_folder.section import RunSection
from esmeray.train_config.section import Overrides

_COMPARED = 2000
"""Maximum number of proteins that are compared with the training proteins, which takes some 20 s on two cores."""


@dataclass(frozen=True)
class LabelledTexts:
    """N records with targets, (N,) or for residues (R,) int64, or (N, C) float32; and weights, (N,) float32.

    ``counts`` holds the number of records that were changed or left out, by name.
    """

    ids: list[str]
    texts: list[str]
    targets: NDArray
    weights: NDArray[np.float32] | None
    counts: dict[str, int]
    per_residue: bool


def read_texts(
    sources: list[str],
    data: DataSection,
    tokenizer: TokenizerSection,
    space: LabelSpace,
    part: Part = "all",
    overrides: Overrides | None = None,
) -> LabelledTexts:
    """Read labelled files for a model with this label space. The split column selects a part.

    ``overrides`` distinguish command-line settings from defaults.

    Raises ConfigError for settings that the model or the file doesn't support. Raises DataError for an invalid file,
    record or label, or if no record is left.
    """
    labels = _settings(data.labels, space, part, overrides or {})
    records = read_labelled(sources, labels, tokenizer, data.ingest)
    targets = _targets(records, labels, space)
    per_residue = space.kind == "per_residue"
    texts = LabelledTexts(records.ids, records.texts, targets, None, _left_out(records.counts), per_residue)
    chosen = np.ones(len(texts.ids), dtype=bool)
    if part != "all":
        chosen &= np.array([name == part for name in records.parts or []], dtype=bool)
        texts.counts["records_of_other_parts"] = int((~chosen).sum())
    # A residue without a label is left out by itself; its record stays.
    if labels.unseen_labels == "skip" and not per_residue:
        known = has_target(targets)
        texts.counts["records_unseen_label"] = int((~known & chosen).sum())
        chosen &= known
    if not chosen.any():
        of_part = "" if part == "all" else f" of part {part}"
        raise DataError(f"{', '.join(sources)}: no record{of_part} has a label that the model knows")
    return texts if chosen.all() else _selected(texts, chosen)


def own_texts(
    section: RunSection,
    data: DataSection,
    tokenizer: TokenizerSection,
    space: LabelSpace,
    part: Part,
) -> LabelledTexts:
    """Read the records that a run was trained on, or held out, by its own split.

    If the run's labelled store is gone, they are read from the source. Raises DataError if the source's labels differ
    from the model's, or if the split lacks the part. Raises CheckpointError if the source differs from the one in the
    run's checkpoints.
    """
    run = RunFolder(section.storage_path, section.name)
    # A progress bar, because reading a large source again takes minutes if the store is gone.
    with conversion_bar("reading the run's data") as progress:
        store = LabelledStore(ensure_labelled_store(data, tokenizer, run.stores, progress, identity_clusters))
    if store.label_space != space:
        raise DataError(f"{', '.join(data.source)}: its labels differ from the labels that the model was trained on")
    # The source may have changed since: a new split would mix training with held-out records.
    check_data(run, data.source, store.checksum)
    parts = {"training": store.training, "validation": store.validation, "test": store.test}
    in_parts = np.sort(np.concatenate([*parts.values()]))  # without records outside of the split, counted already
    records = in_parts if part == "all" else parts[part]
    if not records.size:
        raise DataError(f"the run's split has no {part} records")
    numbers = records.tolist()
    per_residue = space.kind == "per_residue"
    return LabelledTexts(
        ids=list(map(store.store.id, numbers)),
        texts=list(map(store.store.text, numbers)),
        targets=np.concatenate([*map(store.residue_targets, numbers)]) if per_residue else store.targets[records],
        weights=None if store.weights is None else store.weights[records],
        counts={**_left_out(store.counts), "records_of_other_parts": in_parts.size - records.size},
        per_residue=per_residue,
    )


def training_store(run: RunSection, data: DataSection) -> LabelledStore | None:
    """Labelled store that the model's run was trained on; None if its checkpoints or the store are missing.

    The store is found by the checksum in a checkpoint, because the source may have changed or be gone.
    """
    folder_of_run = RunFolder(run.storage_path, run.name)
    checkpoint = CheckpointStore(folder_of_run.checkpoints).newest_intact()
    if checkpoint is None:
        return None
    for folder in (*folder_of_run.stores.glob("*"), *map(Path, filter(None, (data.store, *data.source)))):
        if not (folder / MANIFEST_FILE).is_file():  # a source may be a file of any kind
            continue
        with suppress(DataError):  # a damaged store of another run is skipped
            labelled = LabelledStore(folder)
            if labelled.checksum == checkpoint.manifest().store_checksum:
                return labelled
    return None


def sampled_identities(texts: Sequence[str], labelled: LabelledStore, seed: int) -> NDArray[np.float64]:
    """(N,) identity of each protein with its nearest training protein; NaN outside a random sample of the proteins."""
    identities_N = np.full(len(texts), np.nan)
    sample = np.random.default_rng(seed).permutation(len(texts))[:_COMPARED]
    identities_N[sample] = nearest_identity(
        [texts[index] for index in sample.tolist()], labelled.store, labelled.training
    )
    return identities_N


def without_texts(texts: LabelledTexts, unwanted: set[str]) -> LabelledTexts:
    """Select the records whose text is not in ``unwanted``. Raises DataError if no record is left."""
    chosen = np.array([text not in unwanted for text in texts.texts], dtype=bool)
    if not chosen.any():
        raise DataError(
            "the file contains every training record of the run, so no records are left for baselines: remove "
            "--evaluate.baselines"
        )
    return _selected(texts, chosen)


def _settings(labels: LabelsSection, space: LabelSpace, part: Part, overrides: Overrides) -> LabelsSection:
    if labels.kind != space.kind and ("data", "labels", "kind") in overrides:
        raise ConfigError(
            f"--data.labels.kind {labels.kind}: the model was trained for {space.kind}; remove the option"
        )
    update: dict[str, object] = {"kind": space.kind}
    if part == "all":  # otherwise reading would ask for the split that the run was trained with
        update |= {"split": "hash", "split_column": None, "group_column": None, "validation_source": []}
    elif labels.split_column is None:
        raise ConfigError(
            f"--evaluate.part {part} of a file needs a split column: give --data.labels.split column "
            "--data.labels.split_column NAME, or remove --evaluate.input to use the run's own split"
        )
    return labels.model_copy(update=update)


def _targets(records: LabelledRecords, labels: LabelsSection, space: LabelSpace) -> NDArray:
    if isinstance(records.labels, np.ndarray) and tuple(labels.label_columns) != space.names:
        raise ConfigError(
            f"data.labels.label_columns: the model has {', '.join(space.names)} in this order, not "
            f"{', '.join(labels.label_columns)}"
        )
    targets, unseen = space.encode(records.labels, labels.unknown_letters)
    if unseen is not None and labels.unseen_labels == "error":
        raise DataError(
            f"{records.place(unseen.record)}: the model does not know the label {unseen.name!r}; fix it, or give "
            "--data.labels.unseen_labels skip"
        )
    return targets[:]


def _left_out(counts: LabelledCounts) -> dict[str, int]:
    reported = counts.model_dump(exclude={"training", "validation", "test"}, exclude_defaults=True)
    # The report shows the total of counts that are split by name.
    return reported | {name: sum(number.values()) for name, number in reported.items() if isinstance(number, dict)}


def _selected(texts: LabelledTexts, chosen: NDArray[np.bool_]) -> LabelledTexts:
    # Residue targets are concatenated, one per letter.
    rows = np.repeat(chosen, [len(text) for text in texts.texts]) if texts.per_residue else chosen
    return replace(
        texts,
        ids=list(compress(texts.ids, chosen)),
        texts=list(compress(texts.texts, chosen)),
        targets=texts.targets[rows],
        weights=None if texts.weights is None else texts.weights[chosen],
    )


class TextPart(NamedTuple):
    """Consecutive records with ids unique over all parts, and the share of bytes read so far, 0 to 1."""

    ids: list[str]
    texts: list[str]
    share: float


class TextStream:
    """Records to predict from files, folders and globs, in their order, or of the embedded sample.

    They are checked as in training (:mod:`esmeray.dataset.store.ingest`).

    Memory holds one part, and 8 bytes per id to detect duplicates. Raises DataError for a name without a readable file.
    """

    def __init__(
        self, sources: list[str], labels: LabelsSection, tokenizer: TokenizerSection, ingest: IngestSection
    ) -> None:
        is_sample = sources == [SAMPLE]
        self._source = LabelledSource(
            [] if is_sample else find_labelled_files(sources),
            labels,
            tokenizer.content,
            with_labels=False,
            sample=SampleSection() if is_sample else None,
        )
        self._ingest = Ingest(ingest, self._source.places, content=tokenizer.content)
        self._ingest.counts.files_ignored = files_ignored(sources, is_labelled_name)
        self.counts = self._ingest.counts
        """Number of records changed or left out so far."""

    def parts(self, characters: int = 1) -> Iterator[TextPart]:
        """Yield records in parts of at least ``characters`` characters, up to the first invalid record.

        Iterate over them only once.

        Raises DataError for a file that can't be read, or, when all are read, for all invalid records.
        """
        bytes_total = max(1, self._source.bytes_total)
        ids: list[str] = []
        texts: list[str] = []
        size, share = 0, 0.0
        for _, _, block in self._source.cleaned(self._ingest):
            # After an invalid record the rest is still read, so that the error lists all problems.
            if block is None or self._ingest.faults:
                continue
            ids += [record_id.decode("utf-8") for record_id in block.ids.split()]
            cleaned = block.texts()
            texts += cleaned
            size += sum(map(len, cleaned))
            share = min(1.0, self._source.bytes_read / bytes_total)
            if size >= characters:
                yield TextPart(ids, texts, share)
                ids, texts, size = [], [], 0
        if ids:
            yield TextPart(ids, texts, share)
