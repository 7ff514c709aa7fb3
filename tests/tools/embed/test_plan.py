"""``embed plan`` prints a table or JSON with the arithmetic in docs/embeddings.md."""

import json

import pytest


def test_a_plan_is_a_table_and_a_file_by_the_documented_arithmetic(command, tmp_path):
    path = tmp_path / "plan.json"
    words = f"embed plan --plan.model esm2_t6_8M --plan.gpu laptop --plan.devices 2 --plan.price 3 --plan.dtype fp32 \
--plan.proteins 1e6 1e9 --plan.assume.tokens_per_s 25000 --plan.json_output {path}"
    outcome = command.done(words)
    assert max(map(len, outcome.out.splitlines())) <= 120
    million, billion = json.loads(path.read_text())["rows"]
    assert million["hours"] == pytest.approx(1e6 * 332 / 50_000 / 3600)
    assert million["money"] == pytest.approx(million["hours"] * 2 * 3)
    assert million["vector_bytes"] == 1e6 * 320 * 4
    assert billion["memory_bytes"] == 64e9  # one bit per value and 24 bytes, like a DiskANN index of 10^9
    # A million vectors have 4,000 clusters; more vectors have a cluster per 39 vectors of a 256 MiB sample.
    assert billion["queries_per_s"] == pytest.approx(million["queries_per_s"] / (1000 * 4000 / (2**28 // 1280 // 39)))
    assert command(words).code == 2  # the output exists
    command.done(f"{words} --overwrite --plan.index exact --plan.output residues")
    exact = json.loads(path.read_text())["rows"][0]
    assert (exact["memory_bytes"], exact["index_bytes"]) == (1e6 * 320 * 4, 1e6 * 320 * 6)
    assert exact["vector_bytes"] == 1e6 * 330 * 320 * 4


def test_the_rate_is_the_peak_of_the_gpu_by_the_operations_of_a_token(command, tmp_path):
    path = tmp_path / "plan.json"
    command.done(
        f"embed plan --plan.model esm2_t33_650M --plan.gpu h100 --plan.assume.mfu 0.5 --plan.json_output {path}"
    )
    weights = 33 * 12 * 1280**2  # linear layers only: embeddings are lookups
    flops = 2 * weights + 4 * 33 * 1280 * 500
    assert json.loads(path.read_text())["tokens_per_s"] == pytest.approx(0.5 * 989.4e12 / flops, rel=1e-3)


def test_what_cannot_be_planned_is_one_line(command):
    for options, reason in [
        ("--plan.gpu abacus", "'abacus' has no known peak in bf16; use one of B200"),
        ("--plan.model esm2_t7", "model.backbone.source"),
        ("--plan.proteins 0", "plan.proteins"),
    ]:
        assert command.refused(2, reason, f"embed plan {options}").out == ""
