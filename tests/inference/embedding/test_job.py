"""A job writes every protein's vector once, resumes to the same bytes, and refuses another job's folder."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from esmeray.common.errors import ConfigError, DataError, EsmerayError, ResourceError
from esmeray.dataset.embeddings.manifest import read_manifest
from esmeray.dataset.embeddings.reader import read_embeddings
from esmeray.dataset.section import IngestSection
from esmeray.dataset.store.conversion import convert
from esmeray.inference.embedding.job import run_job
from esmeray.inference.embedding.model_job import ModelJob
from esmeray.inference.models.model import Model
from tests.damage import flipped
from tests.dataset.tokenizer_folders import esm
from tests.inference.embedding.jobs import (
    LENGTHS,
    computed_shards,
    final_bytes,
    partial,
    replace,
    request,
    stopped_after,
    vectors,
    write_proteins,
)
from tests.inference.models.opened import opened, rows_of
from tests.model.small_models import save_masked_lm, save_small_model
from tests.model.support import random_sequences


def expected(folder: Path, sequences: list[str], output: str = "mean") -> list[np.ndarray]:
    model = opened(folder / "model")
    return [rows_of(model, [sequence], [output])[output].numpy() for sequence in sequences]


@pytest.mark.parametrize("file_format", ["parquet", "hdf5"])
def test_each_protein_has_its_vector_in_the_order_of_the_input(tmp_path: Path, file_format: str):
    sequences = random_sequences([5, 40, 12, 33])
    sequences.insert(2, sequences[0])  # two ids with one sequence
    ids = ["sp|P1|A/B", "c:2", "again", "x.y", "z"]
    write_proteins(tmp_path / "proteins.fasta", sequences, ids)
    outputs = ["mean", "residues", "contacts"]
    (report,) = run_job(request(tmp_path, outputs=outputs, format=file_format))
    opened = read_embeddings(tmp_path / "out", "mean")
    assert opened.ids == ids
    assert opened.lengths.tolist() == [len(sequence) for sequence in sequences]
    np.testing.assert_array_equal(opened["sp|P1|A/B"], opened["again"])
    for output in outputs:
        found, wanted = vectors(tmp_path / "out", output).values(), expected(tmp_path, sequences, output)
        for rows, alone in zip(found, wanted, strict=True):
            np.testing.assert_allclose(rows.ravel(), alone.ravel(), rtol=1e-5, atol=1e-6)
    assert (report["proteins"], report["distinct_sequences"], report["computed_sequences"]) == (5, 4, 4)
    saved = json.loads((tmp_path / "out" / "embedding_performance_report_cpu.json").read_text())
    assert saved == report and report["residues"] == sum(map(len, sequences)) - len(sequences[0])
    assert len(list((tmp_path / "out" / "logs").glob("embed-*.log"))) == 1
    assert not (tmp_path / "out.partial").exists()


def test_a_masked_output_counts_a_pass_for_each_residue(tmp_path: Path):
    save_masked_lm(esm(tmp_path / "model"), "esm", vocab_size=33)
    kinds = ["mean", "pseudo_log_likelihood"]
    with computed_shards() as shards:
        (report,) = run_job(request(tmp_path, outputs=kinds, shard_tokens=2000))
    assert report["tokens"] == sum((length + 1) * (length + 2) for length in LENGTHS)
    assert len(shards) > 1, "a shard has a limit of tokens, in all of its passes"
    wanted = opened(tmp_path / "model").embed(random_sequences(LENGTHS), kinds[1])
    np.testing.assert_array_equal([*vectors(tmp_path / "out", kinds[1]).values()], wanted)


def test_narrow_files_are_near(tmp_path: Path):
    run_job(request(tmp_path, outputs=["residues", "mean"], output=tmp_path / "whole"))
    for dtype, error in {"fp16": 1e-3, "bf16": 8e-3, "int8": 1e-2}.items():
        outputs = ["residues"] if dtype == "bf16" else ["residues", "mean"]
        run_job(request(tmp_path, outputs=outputs, dtype=dtype, output=tmp_path / dtype))
        for output in outputs:
            narrow, whole = vectors(tmp_path / dtype, output), vectors(tmp_path / "whole", output)
            largest = max(np.abs(rows).max() for rows in whole.values())
            assert all(np.abs(narrow[name] - rows).max() <= error * largest for name, rows in whole.items())


def test_a_stopped_job_resumes_to_the_same_bytes(tmp_path: Path, caplog):
    job = request(tmp_path, outputs=["mean", "residues"])
    run_job(replace(job, output=tmp_path / "undisturbed"))
    with stopped_after(3) as first:
        run_job(job)
    assert not job.output.exists()
    kept = shutil.copytree(partial(job), tmp_path / "kept")
    with computed_shards() as again:
        run_job(job)
    assert final_bytes(job.output) == final_bytes(tmp_path / "undisturbed")
    assert len(set(first) & set(again)) <= 2  # the lost shard, and the one computed while it was written
    assert sorted({*first, *again}) == list(range(len({*first, *again})))
    for name in ("mean/00001.safetensors", "residues/00000.safetensors", "rows/00001.json", "job.json"):
        shutil.rmtree(job.output, ignore_errors=True)
        shutil.rmtree(partial(job), ignore_errors=True)
        path = shutil.copytree(kept, partial(job)) / "model" / name
        with flipped(path, 8 * path.stat().st_size - 36):
            try:
                run_job(job)
            except EsmerayError as refused:
                assert path.suffix == ".json" and "\n" not in str(refused)
            else:
                assert final_bytes(job.output) == final_bytes(tmp_path / "undisturbed"), name
        assert path.suffix == ".json" or f"shard {path.stem} is computed again" in caplog.text


def test_a_shard_that_is_damaged_while_the_job_runs_is_not_assembled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assemble = ModelJob.assemble

    def damaged(self: ModelJob, building: Path) -> Any:
        with flipped(partial(job) / "model/mean/00001.safetensors", 8 * 300):
            return assemble(self, building)

    job = request(tmp_path)
    monkeypatch.setattr(ModelJob, "assemble", damaged)
    with pytest.raises(DataError, match=r"00001\.safetensors: damaged: .*; run the same command again"):
        run_job(job)
    assert not job.output.exists()


def test_an_output_of_another_job_is_refused_by_name(tmp_path: Path):
    finished = request(tmp_path)
    unfinished = replace(finished, output=tmp_path / "other")
    run_job(finished)
    with stopped_after(2):
        run_job(unfinished)

    def refused(**changed: Any) -> None:
        for job, folder, remedy in (
            (finished, finished.output, r"out: .*pass --over"),
            (unfinished, partial(unfinished), r"partial: .*remove this"),
        ):
            before = final_bytes(folder)
            with pytest.raises((ConfigError, DataError), match=remedy):
                run_job(replace(job, **changed))
            assert final_bytes(folder) == before

    refused(outputs=["max"])
    save_small_model(tmp_path / "model", "esm", seed=1, vocab_size=33)
    refused()
    save_small_model(tmp_path / "model", "esm", vocab_size=33)
    write_proteins(tmp_path / "proteins.fasta", random_sequences([5, 6]))
    refused()
    run_job(finished, overwrite=True)


def test_a_finished_output_is_not_computed_again(tmp_path: Path):
    job = request(tmp_path)
    (report,) = run_job(job)
    before = final_bytes(job.output)
    with stopped_after(1):
        run_job(replace(job, outputs=["max"]), overwrite=True)
    unfinished = final_bytes(partial(job))
    with computed_shards() as computed:
        assert run_job(job) == [report] and not computed
    assert final_bytes(partial(job)) == unfinished and final_bytes(job.output) == before


def test_values_that_are_not_finite_publish_nothing(tmp_path: Path):
    from transformers import EsmModel

    job = request(tmp_path)
    network = EsmModel.from_pretrained(tmp_path / "model", add_pooling_layer=False)
    with torch.no_grad():
        network.encoder.layer[0].output.dense.weight.mul_(1e30)
        network.encoder.layer[1].output.dense.weight.mul_(1e38)
    network.save_pretrained(tmp_path / "model")
    with pytest.raises(DataError, match="NaN or infinity for the batch of P0"):
        run_job(job)
    assert not job.output.exists()


def test_out_of_memory_splits_the_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    job = request(tmp_path, tokens=128, shard_tokens=256)
    run_job(replace(job, output=tmp_path / "whole"))
    rows = Model.rows

    most = 90

    def limited(self: Model, packed: Any, outputs: Any, token_budget: int) -> Any:
        if max(batch.batch.num_tokens for batch in packed) > most:
            raise torch.OutOfMemoryError("no more")
        return rows(self, packed, outputs)

    monkeypatch.setattr(Model, "rows", limited)
    (report,) = run_job(job)
    assert report["batches_split_for_memory"] > 0
    assert read_manifest(job.output).job["batches_split"] == report["batches_split_for_memory"]
    wanted = vectors(tmp_path / "whole")
    for name, vector in vectors(job.output).items():
        np.testing.assert_allclose(vector, wanted[name], rtol=1e-5, atol=1e-6)
    most = 40
    with pytest.raises(ResourceError, match=r"P00005 of 77 residues: out of memory on a single sequence \(no more\)"):
        run_job(job, overwrite=True)


def test_a_full_disk_leaves_what_the_job_resumes_from(tmp_path: Path, full_disk: Any):
    job = request(tmp_path, outputs=["residues"], sequences=random_sequences([10, 12, 9, 300, 10]), shard_tokens=30)
    convert(job.input, tmp_path / "store", IngestSection())
    job = replace(job, input=[str(tmp_path / "store")])
    run_job(replace(job, output=tmp_path / "undisturbed"))
    with (
        full_disk(20_000),
        pytest.raises(
            ResourceError, match=r"no space left.*out\.partial; free some space, then resume with the same command"
        ),
    ):
        run_job(job)
    assert len(list(partial(job).glob("model/rows/*"))) >= 1
    run_job(job)
    assert final_bytes(job.output) == final_bytes(tmp_path / "undisturbed")


def test_long_sequences_follow_the_policy_and_are_counted(tmp_path: Path):
    job = request(tmp_path, outputs=["residues", "mean"], long="error", max_length=30, overlap=10)
    with pytest.raises(DataError, match=r"P00001: 40 residues, more than the limit of 30 \(4 sequences too long\)"):
        run_job(job)
    for policy, left_out, rows in (("crop", 10 + 10 + 47 + 3, 30), ("window", 0, 77)):
        (report,) = run_job(replace(job, long=policy, output=tmp_path / policy))
        assert (report["long_sequences"], report["residues_left_out"]) == (4, left_out)
        assert len(vectors(tmp_path / policy, "residues")["P00005"]) == rows


def test_a_cache_serves_later_jobs(tmp_path: Path):
    job = request(tmp_path, outputs=["mean", "residues", "contacts"], cache=tmp_path / "cache", cache_gb=1)
    (first,) = run_job(job)
    write_proteins(tmp_path / "proteins.fasta", [*random_sequences(LENGTHS)[:6], *random_sequences([50], seed=9)])
    (second,) = run_job(replace(job, output=tmp_path / "second"))
    assert (first["cache_hit_rate"], second["cache_hit_rate"]) == (0, pytest.approx(6 / 7))
    assert second["computed_sequences"] == 1
    ours, theirs = vectors(tmp_path / "second"), vectors(job.output)
    assert all(np.array_equal(ours[name], theirs[name]) for name in list(ours)[:6])
    (third,) = run_job(replace(job, output=tmp_path / "third", cache_gb=1e-9))
    assert third["cache_hit_rate"] == 1
    assert not list((tmp_path / "cache").glob("*/shard-*")) or third["computed_sequences"] == 0
