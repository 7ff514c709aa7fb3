"""Shards computed on one device, each to a file: what a job's process does, or each of its Ray actors.

In: a shard's description. Out: its file, complete under its name, and a row about it. While one batch is fetched from
the device, the next is computed; while one shard is written, the next is. Out of memory splits a batch, which is
counted. Ranges of torch.profiler name what is done beside the model, for :mod:`inference.embedding_profile`.

Shape legend: n sequences of a shard, R rows, C channels.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.profiler import record_function

from common.background_thread import BackgroundThread
from common.errors import DataError, ResourceError
from dataset.embeddings.arrays import quantized, scales_of
from dataset.store.reader import Store
from inference.embedding.encoder import Encoder
from inference.embedding.plan import Shard
from inference.embedding.request import JobRequest
from inference.embedding.settings import ModelFacts, Output
from inference.embedding.shard_files import Computed, ShardFiles, ShardRow
from model.device import DTYPES, HostCopy, is_out_of_memory

WARM_UP_BATCHES = 3
"""First batches of a process, which do not count in the times of a batch."""


class ShardWorker:
    """Computes shards with one encoder.

    Args:
        encoder: on the device.
        store: of the sequences.
    """

    def __init__(self, encoder: Encoder, store: Store) -> None:
        self.encoder, self._store = encoder, store
        self._warm_up = WARM_UP_BATCHES
        self._splits = 0

    def compute(
        self, shard: Shard, progress: Callable[[int], None] = lambda sequences: None
    ) -> tuple[Computed, ShardRow]:
        """The arrays of each output, and the row of the shard, without checksums of files.

        ``progress`` is called after each batch, with its sequences. Raises DataError where a value is not finite,
        ResourceError where a single sequence is out of memory.
        """
        start_s = last_s = time.perf_counter()
        batch_s, memory = [], []
        parts: dict[str, dict[int, NDArray]] = {output.name: {} for output in self.encoder.facts.outputs}
        self._splits = 0
        for places, rows in self._fetched(shard):
            self._place(shard, places, rows, parts)
            memory.append(self._memory())
            now_s = time.perf_counter()
            if self._warm_up:
                self._warm_up -= 1
            else:
                batch_s.append(now_s - last_s)
            last_s = now_s
            progress(len(places))
        facts = self.encoder.facts
        special = len(self.encoder.tokenizer.prefix) + len(self.encoder.tokenizer.suffix)
        tokens_n = shard.lengths + special
        row = ShardRow(
            number=shard.number,
            sequences=shard.records.size,
            residues=int(shard.lengths.sum()),
            tokens=int(tokens_n.sum()),
            batches=len(memory),
            seconds=time.perf_counter() - start_s,
            batch_s=batch_s,
            splits=self._splits,
            flops=facts.flops(tokens_n),
            peak_bytes=self._peak(memory),
            mean_bytes=int(np.mean(memory)),
        )
        return {output.name: self._joined(output, parts[output.name]) for output in facts.outputs}, row

    def _fetched(self, shard: Shard) -> Iterator[tuple[NDArray[np.int64], dict[str, NDArray]]]:
        """Places of the sequences of each batch, and its rows, once the next batch was launched."""
        waiting: list[tuple[NDArray[np.int64], HostCopy]] = []
        for places in shard.batches():
            waiting += self._launched(shard, places)
            while len(waiting) > 1:
                yield _read(*waiting.pop(0))
        for places, copied in waiting:
            yield _read(places, copied)

    def _launched(self, shard: Shard, places: NDArray[np.int64]) -> list[tuple[NDArray[np.int64], HostCopy]]:
        """One batch on the device, in parts if it is out of memory."""
        try:
            rows = self._encoded(shard, places)
            with record_function("copy back"):
                return [(places, HostCopy(rows))]
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            reason = str(error)
        if self.encoder.device.type == "cuda":
            torch.cuda.empty_cache()
        if len(places) == 1:
            record = int(shard.records[places[0]])
            raise ResourceError(
                f"{self._store.id(record)}: out of memory on a single sequence of {shard.lengths[places[0]]:,} "
                f"residues ({reason.splitlines()[0]}); choose --long window or crop with --max-length"
            )
        self._splits += 1
        half = len(places) // 2
        return self._launched(shard, places[:half]) + self._launched(shard, places[half:])

    def _encoded(self, shard: Shard, places: NDArray[np.int64]) -> dict[str, Tensor]:
        lengths = shard.lengths[places]
        with record_function("tokenize"):
            sequences = self._store.windows(shard.records[places], np.zeros_like(lengths), lengths)
        if shard.window is not None and lengths[0] > shard.window:
            overlap = min(self.encoder.settings.overlap, shard.window - 1)
            rows = self.encoder.encode_windows(sequences[0], shard.window, overlap, shard.budget)
        else:
            batch = self.encoder.pack(sequences)
            with record_function("copy to device"):
                batch = batch.to(self.encoder.device, non_blocking=True)
            rows = self.encoder.encode(batch)
        dtype = DTYPES.get(self.encoder.settings.dtype, torch.float32)
        per = {output.name: output.per for output in self.encoder.facts.outputs}
        return {name: row if per.get(name, "protein") == "protein" else row.to(dtype) for name, row in rows.items()}

    def _place(
        self, shard: Shard, places: NDArray[np.int64], rows: dict[str, NDArray], parts: dict[str, dict[int, NDArray]]
    ) -> None:
        """Note which rows are which sequence's."""
        if not rows["finite"]:
            ids = [self._store.id(int(record)) for record in shard.records[places][:3]]
            raise DataError(
                f"the model gives NaN or infinity in the batch of {', '.join(ids)} ...; check its weights, or choose "
                "another --precision"
            )
        for output in self.encoder.facts.outputs:
            lengths = shard.lengths[places]
            sizes = {"protein": np.ones_like(lengths), "residue": lengths, "pair": lengths**2}[output.per]
            ends = np.cumsum(sizes)
            for place, start, end in zip(places.tolist(), (ends - sizes).tolist(), ends.tolist(), strict=True):
                parts[output.name][place] = rows[output.name][start:end]

    def _joined(self, output: Output, rows: dict[int, NDArray]) -> dict[str, NDArray]:
        ordered = [rows[place] for place in range(len(rows))]
        values = np.concatenate(ordered)
        arrays = {"offsets": np.cumsum([0, *map(len, ordered)], dtype=np.int64)}
        if output.per != "protein" and self.encoder.settings.dtype == "int8":
            scales = scales_of(np.abs(values).max(axis=0))
            return {**arrays, "scales": scales, "values": quantized(values, scales)}
        return {**arrays, "values": values}

    def _memory(self) -> int:
        if self.encoder.device.type == "cuda":
            return int(torch.cuda.memory_allocated(self.encoder.device))
        return int(psutil.Process().memory_info().rss)

    def _peak(self, memory: list[int]) -> int:
        if self.encoder.device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self.encoder.device))
        return max(memory)


@record_function("copy back")
def _read(places: NDArray[np.int64], copied: HostCopy) -> tuple[NDArray[np.int64], dict[str, NDArray]]:
    tensors = copied.read()
    bits = {name: t.view(torch.int16) if t.dtype == torch.bfloat16 else t for name, t in tensors.items()}
    arrays = {name: tensor.numpy() for name, tensor in bits.items()}
    return places, {name: array.view(np.uint16) if array.dtype == np.int16 else array for name, array in arrays.items()}


class LocalEngine:
    """Shards computed in this process; one is written while the next is computed."""

    def __init__(self, request: JobRequest, source: str, store: Store, files: ShardFiles) -> None:
        encoder = Encoder(source, request.settings, request.device or "cpu", random_weights=request.random_weights)
        self.facts: ModelFacts = encoder.facts
        self._worker = ShardWorker(encoder, store)
        self._files = files

    def run(self, shards: list[Shard], progress: Callable[[int], None]) -> Iterator[ShardRow]:
        """Rows of the shards, each when its files are complete; ``progress`` is called with sequences computed."""
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
        """Nothing: the process ends."""
