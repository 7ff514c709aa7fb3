"""``embed plan`` prints a table with the arithmetic in docs/embeddings.md."""

import pytest

from esmeray.tools.embed.plan import EmbeddingPlanSection, forecast, tokens_per_s, without_weights


def test_a_plan_follows_the_documented_arithmetic(command):
    outcome = command.done("embed plan --plan.model esm2_t6_8M --plan.gpu laptop --plan.assume.tokens_per_s 25000")
    assert max(map(len, outcome.out.splitlines())) <= 120
    plan = EmbeddingPlanSection(devices=2, price=3)
    million, billion = (forecast(plan, 320, 25_000, proteins) for proteins in (1e6, 1e9))
    assert million.hours == pytest.approx(1e6 * 332 / 50_000 / 3600)
    assert million.money == pytest.approx(million.hours * 2 * 3)
    assert million.vector_bytes == 1e6 * 320 * 2
    assert billion.memory_bytes == 64e9  # one bit per value and 24 bytes, like a DiskANN index of 10^9
    # A million vectors have 4,000 clusters; more vectors have a cluster per 39 vectors of a 256 MiB sample.
    assert billion.queries_per_s == pytest.approx(million.queries_per_s / (1000 * 4000 / (2**28 // 1280 // 39)))
    exact = forecast(EmbeddingPlanSection(index="exact", output="residues"), 320, 25_000, 1e6)
    assert (exact.memory_bytes, exact.index_bytes) == (1e6 * 320 * 4, 1e6 * 320 * 6)
    assert exact.vector_bytes == 1e6 * 330 * 320 * 2


def test_the_rate_is_the_peak_of_the_gpu_by_the_operations_of_a_token():
    plan = EmbeddingPlanSection(gpu="h100", assume={"mfu": 0.5})
    weights = 33 * 12 * 1280**2  # linear layers only: embeddings are lookups
    flops = 2 * weights + 4 * 33 * 1280 * 500
    assert tokens_per_s(plan, without_weights("esm2_t33_650M")) == pytest.approx(0.5 * 989.4e12 / flops, rel=1e-3)


def test_what_cannot_be_planned_is_one_line(command):
    for options, reason in [
        ("--plan.gpu abacus", "'abacus' has no known peak in bf16; use one of B200"),
        ("--plan.model esm2_t7", "model.backbone.source"),
        ("--plan.devices 0", "plan.devices"),
    ]:
        assert command.refused(2, reason, f"embed plan {options}").out == ""
