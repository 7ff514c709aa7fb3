"""A finished output is extended by new proteins: old files stay unchanged, and values equal a single job's."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from esmeray.common import processor
from esmeray.common.errors import ConfigError, DataError
from esmeray.common.publishing import MADE_FILE
from esmeray.common.remote import listing, upload
from esmeray.dataset.embeddings.reader import read_embeddings
from esmeray.inference.embedding.job import run_job
from esmeray.inference.embedding.model_job import ModelJob
from esmeray.inference.embedding.section import EmbedJobSection
from tests.collisions import hashes_of_one_bit
from tests.inference.embedding.jobs import (
    final_bytes,
    replace,
    request,
    small_model_folder,
    stopped_after,
    vectors,
    write_proteins,
)
from tests.model.small_models import save_small_model
from tests.model.support import random_sequences
from tests.object_store import object_store, use_storage

pytestmark = pytest.mark.slow

SEQUENCES = random_sequences([40, 33, 61, 40, 77, 52, 38, 45, 50, 36])
IDS = [f"P{number}" for number in range(len(SEQUENCES))]
FIRST = 6


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Use one thread: fp32 results then do not depend on the batch, from about ten tokens on."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def more_proteins(folder: Path) -> Path:
    """All records, and two more ids with duplicate sequences: one of the first records, one of the new records."""
    return write_proteins(folder / "more.fasta", [*SEQUENCES, SEQUENCES[1], SEQUENCES[-1]], [*IDS, "old", "new"])


def begun(folder: Path, **settings: Any) -> tuple[EmbedJobSection, EmbedJobSection]:
    """A finished job with the first six proteins, and a job with all proteins for the same output."""
    job = request(folder, sequences=SEQUENCES[:FIRST], **settings)
    write_proteins(folder / "proteins.fasta", SEQUENCES[:FIRST], IDS[:FIRST])
    run_job(job)
    return job, replace(job, input=[str(more_proteins(folder))])


def assert_same_vectors(folder: Path | str, expected: Path, *outputs: str) -> None:
    for output in outputs:
        ours, theirs = vectors(folder, output), vectors(expected, output)
        assert list(ours) == list(theirs) == [*IDS, "old", "new"]
        assert all(ours[name].tobytes() == rows.tobytes() for name, rows in theirs.items()), output


@pytest.mark.parametrize(
    ("file_format", "dtype", "outputs"),
    [
        ("parquet", "fp32", ["mean", "residues", "contacts"]),
        ("hdf5", "fp16", ["mean", "residues"]),
        ("parquet", "bf16", ["residues"]),
    ],
)
def test_a_grown_output_has_the_values_of_one_job(tmp_path: Path, file_format: str, dtype: str, outputs: list[str]):
    job, more = begun(tmp_path, format=file_format, dtype=dtype, outputs=outputs)
    before = final_bytes(job.output)
    opened = read_embeddings(job.output)
    _, report = run_job(more)
    run_job(replace(more, output=tmp_path / "whole"))
    assert_same_vectors(job.output, tmp_path / "whole", *outputs)
    after = final_bytes(job.output)
    assert before.items() <= after.items(), "nothing is written again"
    assert (report["proteins"], report["computed_sequences"], report["distinct_sequences"]) == (6, 4, 5)
    assert len(list(opened)) == FIRST, "who has the old state open reads it on"
    grown = read_embeddings(job.output)
    assert len(np.unique(grown.sequences)) == len(SEQUENCES)
    assert grown.sequences[-2] == grown.sequences[1] and grown.sequences[-1] == grown.sequences[9]
    for rows, (start, stop) in ((grown[4:8], (4, 8)), (grown[6:6], (6, 6)), (grown[-1:], (11, 12))):
        assert len(rows) == stop - start
        assert all(np.array_equal(row, grown[number]) for number, row in enumerate(rows, start))
    assert run_job(job)[1] == report and final_bytes(job.output) == after, "all of its records are there"


def test_a_grown_output_keeps_its_precision(tmp_path: Path, monkeypatch):
    _, more = begun(tmp_path)
    (tmp_path / "cpuinfo").write_text("flags : amx_bf16")
    monkeypatch.setattr(processor, "CPU_INFO", tmp_path / "cpuinfo")
    assert [report["precision"] for report in run_job(replace(more, precision=None))] == ["fp32", "fp32"]


def test_int8_grows_with_scales_of_its_own(tmp_path: Path):
    job, more = begun(tmp_path, dtype="int8")
    run_job(more)
    run_job(replace(more, dtype="fp32", output=tmp_path / "whole"))
    ours, theirs = vectors(job.output), vectors(tmp_path / "whole")
    assert all(np.abs(ours[name] - rows).max() <= 1e-2 * np.abs(rows).max() for name, rows in theirs.items())


def test_a_killed_growth_leaves_the_old_output_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    job, more = begun(tmp_path)
    before = final_bytes(job.output)
    with stopped_after(2):
        run_job(more)
    assert final_bytes(job.output) == before and len(read_embeddings(job.output)) == FIRST
    with pytest.raises(ConfigError, match=r"out\.grown\.partial: contains the work of another job"):
        run_job(job)

    def killed_late(_: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr("esmeray.inference.embedding.job.sync", killed_late)
        run_job(more)
    assert len(read_embeddings(job.output)) == len(SEQUENCES) + 2
    run_job(more)
    assert not list(tmp_path.glob("*.partial"))
    run_job(replace(more, output=tmp_path / "whole"))
    assert_same_vectors(job.output, tmp_path / "whole", "mean")


def test_an_id_with_another_sequence_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    job, more = begun(tmp_path)
    write_proteins(tmp_path / "more.fasta", [SEQUENCES[2], SEQUENCES[8]], ["P1", "P8"])
    there = sorted(tmp_path.rglob("*"))
    before = final_bytes(job.output)
    monkeypatch.setattr(ModelJob, "compute", lambda self: pytest.fail("a model was loaded"))
    with pytest.raises(DataError, match=r"out: 'P1' has a different sequence in .*more\.fasta; give it another id"):
        run_job(more)
    assert sorted(tmp_path.rglob("*")) == there and final_bytes(job.output) == before


def test_known_vectors_are_taken_and_those_of_another_model_are_refused(tmp_path: Path):
    job, more = begun(tmp_path, outputs=["mean", "residues"])
    known = replace(more, output=tmp_path / "taken", known=[str(job.output)])
    (report,) = run_job(known)
    assert report["computed_sequences"] == len(SEQUENCES) - FIRST
    run_job(replace(more, output=tmp_path / "whole"))
    assert_same_vectors(tmp_path / "taken", tmp_path / "whole", "mean", "residues")
    for changes, words in [
        ({"outputs": ["max"]}, r"max\.description was None"),
        ({"dtype": "fp16"}, r"mean\.dtype was 'fp32', is now 'fp16'"),
        ({"max_length": 90}, "settings.max_length was None, is now 90"),
    ]:
        with pytest.raises(ConfigError, match=rf"--embed.known .*out: its values can't be reused \({words}"):
            run_job(replace(known, output=tmp_path / "refused", **changes))
    save_small_model(tmp_path / "model", "esm", seed=1, vocab_size=33)
    with pytest.raises(ConfigError, match=r"can't be reused \(model was .*same model"):
        run_job(replace(known, output=tmp_path / "refused"))
    with pytest.raises(ConfigError, match=r"out: contains the work of another job \(model was"):
        run_job(more)
    assert not list(tmp_path.glob("refused*"))


def test_several_models_grow_together_and_what_grew_is_replaced_as_a_whole(tmp_path: Path):
    other = small_model_folder(tmp_path / "other")
    job, more = begun(tmp_path, models=[str(tmp_path / "model"), str(other)])
    run_job(more)
    for name in ("model", "other"):
        assert len(read_embeddings(job.output / name)) == len(SEQUENCES) + 2
    with pytest.raises(ConfigError, match="of other models"):
        run_job(replace(more, models=[str(other)]))
    run_job(job, overwrite=True)
    assert len(read_embeddings(job.output / "model")) == FIRST and not list(job.output.rglob("part-*"))


def test_an_output_at_a_uri_grows_and_is_read_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    use_storage(monkeypatch, cache_folder=str(tmp_path / "cache"))
    uri = "s3://bucket/grown/out"
    with object_store() as store:
        job, more = begun(tmp_path, output=Path(uri), outputs=["mean", "residues"])

        def cut_short(folder: Path, target: str, last: str) -> None:
            upload(folder / MADE_FILE, f"{target}/{MADE_FILE}")
            raise KeyboardInterrupt

        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr("esmeray.inference.embedding.job.upload_folder", cut_short)
            run_job(more)
        assert len(read_embeddings(uri)) == FIRST
        store.requests.clear()
        run_job(more)
        written = [path for method, path in store.requests if method == "PUT" and path.startswith("/bucket/grown/out/")]
        assert written[-1].endswith("part-00001/embeddings.json") and all("part-00001" in path for path in written)
        assert not listing(f"{uri}.grown.partial")
        run_job(replace(more, output=tmp_path / "whole"))
        assert_same_vectors(uri, tmp_path / "whole", "mean", "residues")
        run_job(replace(more, output=tmp_path / "taken", known=[uri]))
        assert_same_vectors(tmp_path / "taken", tmp_path / "whole", "mean", "residues")
        run_job(job, overwrite=True)
        assert not any("part-" in name for name in listing(uri))


def test_a_part_copied_from_another_output_is_refused(tmp_path: Path):
    job, more = begun(tmp_path)
    run_job(more)
    other = replace(job, output=tmp_path / "other", input=[str(write_proteins(tmp_path / "o.fasta", SEQUENCES[:3]))])
    run_job(other)
    run_job(replace(other, input=[str(write_proteins(tmp_path / "o.fasta", SEQUENCES[:4]))]))
    shutil.copytree(tmp_path / "other" / "part-00001", job.output / "part-00002")
    for use in (lambda: read_embeddings(job.output), lambda: run_job(more)):
        with pytest.raises(DataError, match=r"part-00002.*: does not belong to this output \(continues was"):
            use()
    shutil.rmtree(job.output / "part-00002")
    assert len(read_embeddings(job.output)) == len(SEQUENCES) + 2


def test_sequences_of_one_hash_get_vectors_of_their_own(tmp_path: Path):
    """Check a single job, a job that reuses known vectors, and an id that returns with the other sequence."""
    every = random_sequences([30] * 6)
    first = write_proteins(tmp_path / "first.fasta", every[:3])
    second = write_proteins(tmp_path / "second.fasta", every[3:])
    with hashes_of_one_bit():
        job = request(tmp_path, sequences=[*every, *every[:1]])
        (report,) = run_job(job)
        assert report["computed_sequences"] == 6
        expected = [*vectors(job.output).values()]
        assert len(np.unique(expected, axis=0)) == 6
        known = replace(job, output=tmp_path / "known", input=[str(first)])
        run_job(known)
        other = replace(job, output=tmp_path / "other", input=[str(second)], known=[str(known.output)])
        assert run_job(other)[0]["computed_sequences"] == 3
        assert np.array_equal([*vectors(other.output).values()], expected[3:6])
        with pytest.raises(DataError, match=r"'P0000.' has a different sequence in .*second\.fasta"):
            run_job(replace(known, input=other.input))
