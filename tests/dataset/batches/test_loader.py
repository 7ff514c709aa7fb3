"""Steps contain each record once per epoch, for any number of workers and loader processes, from any position.

The number of file openings and checks is independent of readers, batches and epochs. The number of calls and tensors is
independent of the number of sequences in a batch.
"""

import gc
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import lmdb
import numpy as np
import pytest
import torch

from esmeray.common.errors import DataError
from esmeray.dataset.batches.loader import ResidueSource
from esmeray.dataset.batches.loader_process import LoaderProcessLost
from esmeray.dataset.batches.preparation import PreparationSettings
from esmeray.dataset.batches.random_bits import split_records
from esmeray.dataset.batches.steps import StepBatches, TrainingSteps, ValidationSteps
from esmeray.dataset.packed_batch import PackedBatch
from esmeray.dataset.section import BatchSection
from esmeray.dataset.store import format as store_format
from esmeray.dataset.store.reader import Store
from esmeray.dataset.targets import IGNORED_TARGET
from esmeray.tasks.masked_lm.section import MaskedLMSection
from tests.dataset.stores import damage_record, make_store

MASKED = MaskedLMSection()
BATCH = BatchSection(tokens=512, global_tokens=2048)
MAX_LENGTH = 200


@pytest.fixture(scope="module")
def split(small_store) -> tuple[np.ndarray, np.ndarray]:
    return split_records(Store(small_store).sequence_hashes, 0.2)


@pytest.fixture(scope="module")
def with_processes(small_store, split) -> Iterator[TrainingSteps]:
    """Steps that two loader processes prepare; each iteration starts again from the first."""
    with training(small_store, split[0], 2) as batches:
        yield batches


def training(
    small_store, indices, num_workers=0, masking=MASKED, seed=0, rank=0, world_size=1, batch=BATCH, **others
) -> TrainingSteps:
    settings = PreparationSettings(MAX_LENGTH, seed, random_crops=True, masking=masking)
    source = ResidueSource(Store(small_store), settings)
    position = {"rank": rank, "world_size": world_size, "num_workers": num_workers}
    return TrainingSteps(source, indices, batch=batch, seed=seed, **position, **others)


def validation(small_store, indices, masking=MASKED, **others) -> ValidationSteps:
    settings = PreparationSettings(MAX_LENGTH, 0, random_crops=False, masking=masking)
    return ValidationSteps(ResidueSource(Store(small_store), settings), indices, batch=BATCH, **others)


def plain(batch: PackedBatch) -> tuple:
    assert batch.cu_seqlens.dtype == torch.int32 and batch.max_seqlen == batch.cu_seqlens.diff().max()
    tensors = (batch.tokens, batch.by_token["targets"], batch.cu_seqlens, batch.positions, batch.records)
    return (batch.max_seqlen, *(tuple(tensor.tolist()) for tensor in tensors))


def contents(steps) -> list[tuple]:
    return [(step.epoch, step.step, [plain(batch) for batch in step]) for step in steps]


def by_record(steps: list[StepBatches]) -> dict[int, tuple]:
    """Tokens and targets of each record; fails if a record occurs twice."""
    found: dict[int, tuple] = {}
    for batch in (batch for step in steps for batch in step):
        bounds = batch.cu_seqlens.tolist()
        for record, start, end in zip(batch.records.tolist(), bounds, bounds[1:], strict=False):
            assert record not in found
            found[record] = tuple(tuple(rows[start:end].tolist()) for rows in (batch.tokens, batch.by_token["targets"]))
    return found


@pytest.mark.parametrize("world_size", [2, 5])
def test_every_step_has_the_same_records_for_any_number_of_workers(small_store, split, world_size):
    alone = list(training(small_store, split[0]).epoch(0))
    ranks = [list(training(small_store, split[0], rank=r, world_size=world_size).epoch(0)) for r in range(world_size)]
    assert {len(rank) for rank in ranks} == {len(alone)}
    assert sorted(by_record(alone)) == split[0].tolist(), "each record once"
    for batch in (batch for step in alone for batch in step):
        assert torch.equal(batch.target_positions, (batch.by_token["targets"] != IGNORED_TARGET).nonzero()[:, 0])
    for step, parts in zip(alone, zip(*ranks, strict=True), strict=True):
        together = [by_record([part]) for part in parts]
        assert by_record([step]) == {record: rows for part in together for record, rows in part.items()}
        assert sum(map(len, together)) == len(by_record([step])), "each record on one rank alone"
        assert step.num_tokens == sum(part.num_tokens for part in parts)
        assert step.num_targets == sum(part.num_targets for part in parts)
        assert len({len(part) for part in parts}) == 1
        assert seeds(step) == {records: seed for part in parts for records, seed in seeds(part).items()}
    drawn = [seed for step in (*alone, *training(small_store, split[0]).epoch(1)) for seed in seeds(step).values()]
    assert len(set(drawn)) == len(drawn), "no two batches of a run draw the same"


def seeds(step: StepBatches) -> dict[tuple, int]:
    """The seed of each batch by its records, without fillers."""
    by_records = {tuple(batch.records.tolist()): seed for batch, seed in zip(step, step.seeds, strict=True)}
    return {records: seed for records, seed in by_records.items() if records}


def test_loader_processes_change_nothing(small_store, split, with_processes):
    expected = [contents(training(small_store, split[0]).epoch(epoch)) for epoch in (0, 1)]
    assert contents(with_processes.epoch(0)) == expected[0]
    before = [process.pid for process in with_processes.loader._processes]
    assert contents(with_processes.epoch(1)) == expected[1]
    assert [process.pid for process in with_processes.loader._processes] == before


@pytest.mark.parametrize(("num_workers", "offsets"), [(0, (-3, -1, 0, 1)), (1, (-1,))])
def test_resuming_from_a_position_equals_never_stopping(small_store, split, num_workers, offsets):
    whole = [step for epoch in (0, 1) for step in contents(training(small_store, split[0]).epoch(epoch))]
    first_epoch = sum(epoch == 0 for epoch, _, _ in whole)
    for stop in (first_epoch + offset for offset in offsets):
        seen: list[tuple] = []
        with training(small_store, split[0], num_workers) as batches:
            position = (0, 0)
            for step in (step for epoch in (0, 1) for step in batches.epoch(epoch)):
                seen += contents([step])
                position = (step.next_epoch, step.next_step)
                if len(seen) == stop:
                    break
        with training(small_store, split[0], num_workers) as resumed:
            epoch, start = position
            seen += contents(resumed.epoch(epoch, start))
            seen += contents(step for later in range(epoch + 1, 2) for step in resumed.epoch(later))
        assert seen == whole


def test_a_replaced_iteration_raises_and_leaves_the_other_alone(small_store, split, with_processes):
    replaced = with_processes.epoch(0)
    next(replaced)
    current = with_processes.epoch(1)
    first = contents([next(current)])
    with pytest.raises(RuntimeError, match="this iteration ended because another one"):
        list(replaced)
    assert first + contents(current) == contents(training(small_store, split[0]).epoch(1))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_global_batch_and_mask_share_follow_the_steps_of_training(small_store, split, num_workers):
    batch = BATCH.model_copy(update={"first_global_tokens": 512, "ramp_steps": 20})
    masking = MaskedLMSection(first_mask_share=0.9, mask_share=0.1, mask_share_steps=10)
    with training(small_store, split[0], num_workers, masking, batch=batch) as batches:
        whole, first_steps = [], [0]
        for epoch in range(3):
            whole += [(epoch, step) for step in batches.epoch(epoch, first_step=first_steps[-1])]
            first_steps.append(len(whole))
        assert batches.total_steps(3) == len(whole)
        assert first_steps[1] < 20 < len(whole), "the rise continues in the second epoch"
        full = [step for epoch, step in whole if step.next_epoch == epoch]
        assert [len(step) for step in full][:3] == [1, 1, 1] and len(full[-1]) == 4
        shares = [step.num_targets / (step.num_tokens - 2 * sequences_of(step)) for _, step in whole]
        expected = [max(0.9 - 0.08 * number, 0.1) for number in range(len(whole))]
        assert shares == pytest.approx(expected, abs=0.15)
        resumed = list(batches.epoch(1, 2, first_steps[1]))
        assert contents(resumed) == contents(step for epoch, step in whole[first_steps[1] + 2 :] if epoch == 1)


def sequences_of(step: StepBatches) -> int:
    return sum(batch.num_sequences for batch in step)


def test_batches_of_one_shape_have_the_same_records_tokens_and_counts(small_store, split):
    shapes = set()
    kinds = (
        training(small_store, split[0], world_size=3),
        training(small_store, split[0], world_size=3, fixed_shapes=True),
    )
    for epoch in (0, 1):
        ragged, fixed = ([*steps.epoch(epoch)] for steps in kinds)
        assert by_record(ragged) == by_record(fixed)
        assert [(s.num_tokens, s.num_targets) for s in ragged] == [(s.num_tokens, s.num_targets) for s in fixed]
        shapes |= {(b.num_tokens, b.num_sequences, b.max_seqlen) for step in fixed for b in step}
    held_out = validation(small_store, split[1], fixed_shapes=True)
    assert by_record([*held_out.steps()]) == by_record([*validation(small_store, split[1]).steps()])
    (shape,) = shapes
    assert shape[0] == BATCH.tokens and shape[2] == MAX_LENGTH + 2


@pytest.mark.parametrize("num_workers", [0, 1])
def test_damaged_record_ends_training_with_one_line(tmp_path, num_workers):
    path = make_store(tmp_path)
    damage_record(path, 3)
    with training(path, np.arange(120), num_workers) as batches, pytest.raises(DataError, match="damaged") as caught:
        list(batches.epoch(0))
    assert "\n" not in str(caught.value)


def test_a_killed_loader_process_is_reported_and_replaced(small_store, split, with_processes):
    steps = with_processes.epoch(0)
    next(steps)
    os.kill(with_processes.loader._processes[0].pid, signal.SIGKILL)
    with pytest.raises(LoaderProcessLost, match="was killed by signal 9; if it ran into the memory limit"):
        list(steps)
    assert contents(with_processes.epoch(0)) == contents(training(small_store, split[0]).epoch(0))


def test_validation_is_the_same_every_time_and_for_any_number_of_workers(small_store, split):
    batches = validation(small_store, split[1])
    once, again = by_record(list(batches.steps())), by_record(list(batches.steps()))
    assert once == again
    assert sorted(once) == split[1].tolist()
    ranks = [validation(small_store, split[1], rank=rank, world_size=3) for rank in range(3)]
    assert {len(rank) for rank in ranks} == {-(-len(batches) // 3)}
    together = {record: value for rank in ranks for record, value in by_record(list(rank.steps())).items()}
    assert together == once
    for indices, number in ((split[1], 2), (split[1][:0], 0)):
        bounded = validation(small_store, indices, max_batches=2)
        assert len(bounded) == len(list(bounded.steps())) == number


def test_a_store_is_opened_and_checked_once(pristine_store, sample, tmp_path, monkeypatch):
    opened, checked = Mock(wraps=lmdb.open), Mock(wraps=store_format.unframe)
    monkeypatch.setattr(lmdb, "open", opened)
    monkeypatch.setattr(store_format, "unframe", checked)
    path = Path(shutil.copytree(pristine_store, tmp_path / "store"))  # a store that this process has not opened
    readers, records = [Store(path) for _ in range(3)], np.arange(0, len(sample), 20)
    assert all(len(by_record([*training(path, records).epoch(epoch)])) == len(records) for epoch in (0, 1))
    held_out = validation(path, records)
    assert all(len(by_record([*held_out.steps()])) == len(records) for _ in range(2))
    assert all(reader.lengths.size == len(sample) and reader.id(7) == sample[7][0] for reader in readers)
    arrays = 2  # lengths and block offsets
    assert (opened.call_count, checked.call_count) == (1, readers[0].manifest.num_blocks + arrays)


def count_calls(function: Callable[[], object]) -> int:
    """Number of calls of Python and C functions from Python code while ``function`` runs."""
    calls = 0

    def count(_frame, event, _argument) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    function()  # warm-up: do not count what is created once (tables, checked blocks)
    gc.disable()  # a collection would call registered callbacks
    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
        gc.enable()
    return calls


@pytest.mark.parametrize(("masking", "max_length"), [(None, 1000), (MASKED, 100)])
def test_calls_of_a_batch_do_not_grow_with_its_sequences(pristine_store, masking, max_length):
    store = Store(pristine_store)
    batches = ResidueSource(store, PreparationSettings(max_length, 0, True, masking))
    long = np.random.default_rng(1).permutation(np.flatnonzero(store.lengths > 200))  # with a residue to mask

    def make(num_sequences: int) -> PackedBatch:
        return next(batches.batches([(0, long[:num_sequences])])).batch

    assert make(500).num_sequences == 500
    few, many = count_calls(lambda: make(10)), count_calls(lambda: make(500))
    assert few == many < 150
