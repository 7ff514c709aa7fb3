"""Conversion round-trips every record and publishes all or nothing; a run finds the store for its settings."""

import multiprocessing
import os
import shutil
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import count
from pathlib import Path

import dnaio
import pytest

from esmeray.common import background_thread
from esmeray.common.errors import ConfigError, DataError, ResourceError
from esmeray.common.publishing import outputs
from esmeray.dataset.fasta import reader as fasta
from esmeray.dataset.section import DataSection, IngestSection, SampleSection
from esmeray.dataset.store import conversion as store_conversion
from esmeray.dataset.store import writer as store_writer
from esmeray.dataset.store.conversion import convert, ensure_store, job_store
from esmeray.dataset.store.format import DATA_FILE
from esmeray.dataset.store.sample import sample_records
from tests.dataset.stores import TEXT, contents, damage_record, data_of, made, make_store, write_fasta

SMALL = DataSection(sample=SampleSection(records=30, families=3))
FORK = multiprocessing.get_context("fork")


def section(source: Path, store: Path | None = None, **ingest: str) -> DataSection:
    return DataSection(
        source=[str(source)], store=None if store is None else str(store), ingest=IngestSection(**ingest)
    )


def test_real_proteins_come_back_record_by_record(tmp_path, shared_data):
    source = shared_data / "uniref90_10k.fasta.gz"
    manifest = convert([str(source)], tmp_path / "store", IngestSection())
    with dnaio.open(source) as reader:
        expected = [(record.id, record.sequence) for record in reader]
    assert contents(tmp_path / "store") == expected
    assert manifest.num_records == 10_000
    assert manifest.num_residues == sum(len(sequence) for _, sequence in expected)


def test_names_that_are_no_text_are_files_and_stores_as_others(tmp_path, sample):
    folder = tmp_path / os.fsdecode(b"\xd0\xb9\xff")
    folder.mkdir()
    convert([str(write_fasta(folder / "in.fasta", sample))], folder / "store", IngestSection())
    assert contents(folder / "store") == sample


def test_a_failed_conversion_leaves_nothing(tmp_path, sample):
    source = write_fasta(tmp_path / "in.fasta", [*sample, ("bad", "MK-L")])
    with pytest.raises(DataError, match="record 3001 'bad'"):
        convert([str(source)], tmp_path / "store", IngestSection())
    with pytest.raises(DataError, match="no such file"):
        convert([str(tmp_path / "absent.fasta")], tmp_path / "new" / "store", IngestSection())
    write_fasta(source, [("a", "M-K")])
    with pytest.raises(DataError, match="no records left"):
        convert([str(source)], tmp_path / "store", IngestSection(bad_characters="skip"))
    assert [path.name for path in tmp_path.iterdir()] == ["in.fasta"]


def test_runs_that_prepare_one_store_at_once_all_get_it(tmp_path):
    with ProcessPoolExecutor(3, mp_context=FORK) as pool:
        (path,) = {*pool.map(ensure_store, [SMALL] * 3, [tmp_path] * 3)}
    assert len(contents(path)) == 30
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def interrupt() -> None:
    raise KeyboardInterrupt


def interrupted_at(
    line: int, call: Callable[[], object], files: set[str | None], by: Callable[[], None] = interrupt
) -> bool:
    """Interrupt a call at the n-th executed line of these files, from 1; return whether it executed that many."""
    passed = 0

    def trace(frame, event, _argument):
        nonlocal passed
        if frame.f_code.co_filename not in files:
            return None
        passed += event == "line"
        if event == "line" and passed == line:
            sys.settrace(None)
            by()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def test_an_interrupted_conversion_leaves_nothing(tmp_path):
    source = write_fasta(tmp_path / "in.fasta", [("a", "MKV"), ("b", "MKL")])
    conversion = partial(convert, [str(source)], tmp_path / "store", IngestSection())
    files = {module.__file__ for module in (background_thread, fasta, store_writer)}
    for line in count(1, 23):
        if not interrupted_at(line, conversion, files):
            break
        assert [path.name for path in tmp_path.iterdir()] == ["in.fasta"], f"interrupted at line {line}"
    assert line > 100
    assert contents(tmp_path / "store") == [("a", "MKV"), ("b", "MKL")]


@pytest.mark.slow
def test_a_conversion_killed_at_any_line_leaves_no_store_or_a_whole_one(tmp_path):
    source = write_fasta(tmp_path / "in.fasta", [("a", "MKV"), ("b", "MKL")])
    folder = tmp_path / "out"
    target = folder / "store"
    folder.mkdir()
    conversion = partial(convert, [str(source)], target, IngestSection())
    files = {module.__file__ for module in (outputs, store_conversion, store_writer)}
    whole = 0
    for line in count(1, 9):  # which meets the last ten lines, when the store is there already
        killed = partial(interrupted_at, line, conversion, files, partial(signal.raise_signal, signal.SIGKILL))
        process = FORK.Process(target=killed)
        process.start()
        process.join()
        if not process.exitcode:
            break
        assert process.exitcode == -signal.SIGKILL
        assert len(list(folder.glob(".store.scratch-*"))) <= 1, "each conversion sweeps what the one before it left"
        if target.exists():
            assert contents(target) == [("a", "MKV"), ("b", "MKL")], f"killed at line {line}"
            shutil.rmtree(target)
            whole += 1
    assert line > 150 and whole
    assert [path.name for path in folder.iterdir()] == ["store"]


def test_an_existing_target_is_kept_unless_told_otherwise(tmp_path):
    source = write_fasta(tmp_path / "in.fasta", [("a", "MK")])
    convert([str(source)], tmp_path / "store", IngestSection())
    write_fasta(source, [("b", "MK")])
    with pytest.raises(ConfigError, match="already exists"):
        convert([str(source)], tmp_path / "store", IngestSection())
    assert contents(tmp_path / "store") == [("a", "MK")]
    convert([str(source)], tmp_path / "store", IngestSection(), overwrite=True)
    write_fasta(source, [("a", "M1")])
    with pytest.raises(DataError):
        convert([str(source)], tmp_path / "store", IngestSection(), overwrite=True)
    assert contents(tmp_path / "store") == [("b", "MK")], "a conversion that fails keeps the old one"
    (tmp_path / "store" / "thesis.txt").write_text("a thesis")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "manifest.json").write_text('{"name": "a thesis"}')
    for target in (tmp_path / "store", tmp_path / "other"):
        before = sorted(target.iterdir())
        with pytest.raises(ConfigError, match=r"is not a store|contains thesis.txt, which does not belong to a store"):
            convert([str(source)], target, IngestSection(), overwrite=True)
        assert sorted(target.iterdir()) == before


def test_the_sample_is_made_once_and_found_again(tmp_path):
    path = ensure_store(SMALL, tmp_path)
    assert contents(path) == list(sample_records(30, 3, seed=0))
    written = (path / DATA_FILE).stat().st_mtime_ns
    assert ensure_store(SMALL, tmp_path) == path
    assert (path / DATA_FILE).stat().st_mtime_ns == written
    damage_record(path, 7)
    with pytest.raises(DataError, match="damaged"):
        ensure_store(SMALL, tmp_path)


def change_in_place(path: Path, old: str, new: str) -> None:
    """Replace text in a file, with the same size and modification time and in the same inode."""
    status = path.stat()
    path.write_text(path.read_text().replace(old, new))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_changed_files_and_policies_make_another_default_store(tmp_path):
    source = write_fasta(tmp_path / "my proteins.fasta", [("a", "MK"), ("b", "ML")])
    first = ensure_store(section(source), tmp_path / "stores")
    assert first.name.startswith("my-proteins-") and ensure_store(section(source), tmp_path / "stores") == first
    assert ensure_store(section(source, duplicate_ids="first"), tmp_path / "stores") != first
    change_in_place(source, "ML", "MV")
    assert contents(ensure_store(section(source), tmp_path / "stores")) == [("a", "MK"), ("b", "MV")]
    assert contents(first) == [("a", "MK"), ("b", "ML")], "whoever reads the old one keeps it"


def test_a_job_whose_input_has_changed_is_refused(tmp_path):
    source = write_fasta(tmp_path / "in.fasta", [("a", "MK")])
    job_store([str(source)], IngestSection(), tmp_path / "job")
    change_in_place(source, "MK", "MC")
    with pytest.raises(ConfigError, match="its input"):
        job_store([str(source)], IngestSection(), tmp_path / "job")


def test_a_named_store_must_be_made_of_the_source(tmp_path):
    source = write_fasta(tmp_path / "in.fasta", [("a", "MK")])
    store = tmp_path / "store"
    assert ensure_store(section(source, store), tmp_path) == store
    shutil.copy(source, tmp_path / "copy.fasta")
    os.utime(source, (1, 1))
    assert ensure_store(section(source, store), tmp_path) == store, "touched, with the same content"
    assert ensure_store(section(tmp_path / "copy.fasta", store), tmp_path) == store, "moved, with the same content"
    with pytest.raises(DataError, match=r"built with other data\.ingest settings"):
        ensure_store(section(source, store, bad_characters="to_x"), tmp_path)
    with pytest.raises(DataError, match="not from the current sample"):
        ensure_store(DataSection(store=str(store)), tmp_path)
    change_in_place(source, "MK", "ML")
    with pytest.raises(DataError, match=r"built from .*in\.fasta, not from the current .*choose another data\.store"):
        ensure_store(section(source, store), tmp_path)


def test_a_store_may_be_given_as_the_source_but_none_of_texts(tmp_path):
    store = ensure_store(SMALL, tmp_path)
    assert ensure_store(DataSection(source=[str(store)]), tmp_path / "elsewhere") == store
    assert not (tmp_path / "elsewhere").exists()
    with pytest.raises(DataError, match="only source"):
        ensure_store(DataSection(source=[str(store), "sample"]), tmp_path)
    (tmp_path / "in.csv").write_text("id,sequence,label\né,Grüße,x\nö,Tschüs,y\n", encoding="utf-8")
    store = made(data_of(tmp_path / "in.csv", share=0.0, id_column="id"), tmp_path, TEXT).store
    assert (store.id(0), store.text(0), store.lengths.tolist()) == ("é", "Grüße", [7, 7])
    with pytest.raises(DataError, match="a store of texts, which only classifiers can read"):
        ensure_store(DataSection(source=[str(store.path)]), tmp_path / "elsewhere")


def test_a_map_that_is_full_grows_by_itself(tmp_path, sample, monkeypatch):
    monkeypatch.setattr(store_writer, "MAP_BYTES", 1 << 16)
    path = make_store(tmp_path, sample)
    assert contents(path) == sample
    assert sorted(path.name for path in path.iterdir()) == [DATA_FILE, "manifest.json"]


def test_a_full_disk_is_refused_and_leaves_nothing(tmp_path, sample, full_disk):
    source = write_fasta(tmp_path / "in.fasta", sample)
    with full_disk(60_000), pytest.raises(ResourceError, match="no space left") as refused:
        convert([str(source)], tmp_path / "store", IngestSection())
    assert "\n" not in str(refused.value)
    assert [path.name for path in tmp_path.iterdir()] == ["in.fasta"]
