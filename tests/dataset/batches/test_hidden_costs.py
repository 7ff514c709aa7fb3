"""Openings and checks do not grow with readers, batches and epochs; calls and tensors not with a batch's sequences."""

import gc
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import lmdb
import numpy as np
import pytest

from esmeray.dataset.batches.loader import ResidueSource
from esmeray.dataset.batches.preparation import PreparationSettings
from esmeray.dataset.batches.steps import TrainingSteps, ValidationSteps
from esmeray.dataset.packed_batch import PackedBatch
from esmeray.dataset.section import BatchSection
from esmeray.dataset.store import format as store_format
from esmeray.dataset.store.reader import Store
from esmeray.tasks.masked_lm.section import MaskedLMSection
from tests.dataset.stores import make_store, random_proteins

NUM_RECORDS = 500


@pytest.fixture(scope="module")
def store_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("hidden_costs"), random_proteins([200] * NUM_RECORDS))


BATCH = BatchSection(tokens=1024, global_tokens=2048, packing_window=64)


def source(store_path: Path, random_crops: bool) -> ResidueSource:
    settings = PreparationSettings(150, 0, random_crops, MaskedLMSection())
    return ResidueSource(Store(store_path), settings)


def training(store_path: Path) -> TrainingSteps:
    records = np.arange(NUM_RECORDS)
    return TrainingSteps(source(store_path, True), records, batch=BATCH, seed=0)


def count_calls(function: Callable[[], object]) -> int:
    """Calls of functions, Python's own and others', that come from Python code while ``function`` runs."""
    calls = 0

    def count(_frame, event, _argument) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    function()  # what is made once (tables, checked blocks) is not counted
    gc.disable()  # a collection calls what others have registered for it
    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
        gc.enable()
    return calls


def batches_of(batches: TrainingSteps, epochs: int) -> Iterator[PackedBatch]:
    return (batch for epoch in range(epochs) for step in batches.epoch(epoch) for batch in step)


def test_a_store_is_opened_and_checked_once_however_many_readers_batches_and_epochs(store_path, tmp_path, monkeypatch):
    opened, checked = Mock(wraps=lmdb.open), Mock(wraps=store_format.unframe)
    monkeypatch.setattr(lmdb, "open", opened)
    monkeypatch.setattr(store_format, "unframe", checked)
    store_path = Path(shutil.copytree(store_path, tmp_path / "store"))  # one that this process has not open
    readers = [Store(store_path) for _ in range(3)]
    trained = sum(batch.num_sequences for batch in batches_of(training(store_path), 2))
    validation = ValidationSteps(source(store_path, False), np.arange(NUM_RECORDS), batch=BATCH)
    validated = sum(batch.num_sequences for _ in range(2) for step in validation.steps() for batch in step)
    assert (trained, validated) == (2 * NUM_RECORDS, 2 * NUM_RECORDS)
    assert all(reader.lengths.size == NUM_RECORDS and reader.id(7) == "protein7" for reader in readers)
    arrays = 2  # lengths, and where blocks start
    assert (opened.call_count, checked.call_count) == (1, readers[0].manifest.num_blocks + arrays)


@pytest.mark.parametrize(("masking", "max_length"), [(None, 1000), (MaskedLMSection(), 100)])
def test_calls_of_a_batch_do_not_grow_with_its_sequences(store_path, masking, max_length):
    batches = ResidueSource(Store(store_path), PreparationSettings(max_length, 0, True, masking))

    def make(num_sequences: int) -> PackedBatch:
        records_N = np.random.default_rng(1).permutation(NUM_RECORDS)[:num_sequences]
        return next(batches.batches([(0, records_N)])).batch

    assert make(500).num_sequences == 500
    few, many = count_calls(lambda: make(10)), count_calls(lambda: make(500))
    assert few == many < 150


def test_a_batch_is_six_tensors_that_hold_no_memory_beside_their_own(store_path):
    batch = next(batches_of(training(store_path), 1))
    tensors = []
    batch.map(tensors.append)
    storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    assert len(tensors) == len(storages) == 6
    assert sum(tensor.untyped_storage().nbytes() for tensor in tensors) == sum(tensor.nbytes for tensor in tensors)
