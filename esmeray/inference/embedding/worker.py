"""Compute shards on one device and write them, in the job's process or in a Ray actor.

Batches are computed by :func:`esmeray.inference.models.model.run`. While one shard is written, the next is computed.
torch.profiler ranges name the steps outside of the model. Shape legend: n sequences of a shard, R rows, C channels.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from torch.profiler import record_function

from esmeray.common.background_thread import BackgroundThread
from esmeray.common.errors import ConfigError
from esmeray.dataset.embeddings.arrays import quantized, scales_of
from esmeray.dataset.store.reader import Store
from esmeray.inference.embedding.plan import JobFacts, Shard
from esmeray.inference.embedding.section import EmbedJobSection, EmbedSection
from esmeray.inference.embedding.shard_files import Computed, ShardFiles, ShardRow
from esmeray.inference.models.kinds import Output, kind_of, passes
from esmeray.inference.models.model import Model, run
from esmeray.inference.models.opening import open_model
from esmeray.inference.models.source import ModelSource
from esmeray.model.device import DTYPES
from esmeray.model.forward_loop import Indices

WARM_UP_BATCHES = 3
"""Number of first batches per process that are left out of the batch times."""


class ShardTexts:
    """Sequences of a shard, read from the store batch by batch. Long sequences are computed in windows."""

    def __init__(self, shard: Shard, store: Store, overlap: int) -> None:
        self.lengths, self._shard, self._store, self._overlap = shard.lengths, shard, store, overlap

    def batches(self, token_budget: int | None) -> list[Indices]:
        return self._shard.batches()

    @record_function("read")
    def _read(self, indices: Indices) -> list[memoryview]:
        # Views of the store's pages; cropped residues are never read.
        lengths = self.lengths[indices]
        return self._store.windows(self._shard.records[indices], np.zeros_like(lengths), lengths)

    def launch(
        self, model: Model, group: Sequence[Indices], outputs: Sequence[Output], token_budget: int | None
    ) -> list[dict[str, torch.Tensor]]:
        # Without a window setting no sequence exceeds the window.
        window = self._shard.window or int(self.lengths.max())
        # In the plan, sequences with windows have their own batches, which come first because they are the longest.
        long = [indices for indices in group if self.lengths[indices[0]] > window]
        rows = [
            model.rows_over_windows(
                self._read(indices)[0],
                outputs,
                length=window,
                # A window advances by at least one residue, also if the model's limit is smaller than the overlap.
                overlap=min(self._overlap, window - 1),
                token_budget=self._shard.budget,
            )
            for indices in long
        ]
        whole = [model.input_of(self._read(indices)) for indices in group[len(long) :]]
        return rows + (model.rows(whole, outputs, self._shard.budget) if whole else [])

    def name(self, index: int) -> str:
        return f"{self._store.id(int(self._shard.records[index]))} of {self.lengths[index]:,} residues"


class ShardWorker:
    """Computes shards with one model on its device.

    Raises ConfigError for settings that the model doesn't support.
    """

    def __init__(self, model: Model, store: Store, settings: EmbedSection) -> None:
        self.model, self._store, self._settings = model, store, settings
        outputs = model.outputs(settings.outputs, settings.layers)
        if settings.long == "window":
            # Windows are cut between tokens, so that their features can be averaged per residue.
            if not model.tokenizer.one_token_per_residue:
                raise ConfigError("--embed.long window: the tokens of this model are not single residues; use crop")
            wrong = [output.kind for output in outputs if kind_of(output.kind).reads == "tokens"]
            if wrong:
                raise ConfigError(
                    f"--embed.outputs {wrong[0]}: this output can't be averaged over windows; use --embed.long crop"
                )
        crop = "start" if settings.long == "crop" else f"{settings.long} {settings.overlap}"
        self.facts = JobFacts(
            **vars(model.facts),
            outputs=outputs,
            cache_keys={output.name: model.cache_key(output, settings.max_length, crop) for output in outputs},
        )
        # Per process instead of per shard: kernels are chosen and memory is reserved once.
        self._warm_up = WARM_UP_BATCHES

    def compute(
        self, shard: Shard, progress: Callable[[int], None] = lambda sequences: None
    ) -> tuple[Computed, ShardRow]:
        """Compute the arrays of each output, and the row of the shard without file checksums.

        ``progress`` is called after each batch with its number of sequences.

        Raises DataError if a value is not finite, ResourceError if a single sequence is out of memory.
        """
        facts, splits = self.facts, 0
        marks_s = [time.perf_counter()]
        memory: list[int] = []
        texts = ShardTexts(shard, self._store, self._settings.overlap)
        rows: dict[str, dict[int, NDArray]] = {output.name: {} for output in facts.outputs}
        # int8 is quantized from fp32 when the shard's scale is known.
        dtype = DTYPES.get(self._settings.dtype, torch.float32)
        for batch in run(self.model, texts, facts.outputs, shard.budget, dtype=dtype):
            for output in facts.outputs:
                rows[output.name].update(zip(batch.indices.tolist(), batch.by_text(output), strict=True))
            splits = batch.splits
            memory.append(self._memory())  # the next batch is launched already, so this is the memory of a busy device
            marks_s.append(time.perf_counter())
            progress(len(batch.indices))
        warm_up = min(self._warm_up, len(memory))
        self._warm_up -= warm_up
        tokens_n, device = shard.lengths + facts.special_tokens, self.model.device
        row = ShardRow(
            number=shard.number,
            sequences=shard.records.size,
            residues=int(shard.lengths.sum()),
            tokens=int((tokens_n * passes(facts.outputs, shard.lengths)).sum()),
            batches=len(memory),
            seconds=time.perf_counter() - marks_s[0],
            batch_s=np.diff(marks_s)[warm_up:].tolist(),
            splits=splits,
            flops=facts.flops(shard.lengths, facts.outputs),
            peak_bytes=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else max(memory),
            mean_bytes=int(np.mean(memory)),
        )
        return {output.name: self._joined(output, rows[output.name]) for output in facts.outputs}, row

    def _joined(self, output: Output, rows: dict[int, NDArray]) -> dict[str, NDArray]:
        ordered = [rows[index] for index in range(len(rows))]  # batches are sorted longest first
        values = np.concatenate(ordered)
        arrays = {"offsets": np.cumsum([0, *map(len, ordered)], dtype=np.int64)}
        if output.per != "protein" and self._settings.dtype == "int8":
            scales = scales_of(np.abs(values).max(axis=0))
            return {**arrays, "scales": scales, "values": quantized(values, scales)}
        return {**arrays, "values": values}

    def _memory(self) -> int:
        device = self.model.device
        # torch doesn't count CPU memory, so the process's memory is used.
        return torch.cuda.memory_allocated(device) if device.type == "cuda" else psutil.Process().memory_info().rss


def open_worker(source: ModelSource, job: EmbedJobSection, store: Store) -> ShardWorker:
    """Open a job's model with only the heads that its outputs need."""
    model = open_model(
        source,
        job.precision or "fp32",
        job.device or "cpu",
        heads=[kind.head for kind in map(kind_of, job.outputs) if kind.head],
        stream=job.stream,
        weights=job.weights,
    )
    return ShardWorker(model, store, job)


class LocalEngine:
    """Computes shards in this process; one is written while the next is computed."""

    def __init__(self, job: EmbedJobSection, source: ModelSource, store: Store, files: ShardFiles) -> None:
        self._worker, self._files = open_worker(source, job, store), files
        self.facts = self._worker.facts

    def run(self, shards: list[Shard], progress: Callable[[int], None]) -> Iterator[ShardRow]:
        """Yield the row of each complete shard; ``progress`` gets the number of computed sequences."""
        thread: BackgroundThread[ShardRow] = BackgroundThread()
        try:
            for number, shard in enumerate(shards):
                computed, row = self._worker.compute(shard, progress)
                if number:
                    yield thread.wait()
                thread.begin(partial(self._files.write, computed, row))
            if shards:
                yield thread.wait()
        finally:
            thread.close()

    def close(self) -> None:
        """Do nothing: the process ends."""
