"""``train plan`` prints a table of one screen or JSON, or refuses in one line."""

import json

from esmeray.training.launch import scale


def test_a_plan_is_one_screen_and_a_file(command, tmp_path):
    path = tmp_path / "plan.json"
    words = f"train plan --plan.model esm2_t48_15B --plan.gpus 64 --plan.gpu h200 --plan.json_output {path}"
    outcome = command.done(words)
    assert outcome.out.count("\n") <= 24 and max(map(len, outcome.out.splitlines())) <= 120
    scaled = json.loads(path.read_text())
    assert f"{scaled['tokens_per_s']:,.0f} tokens/s" in outcome.out and scaled["binds"] == "compute"
    assert scaled["settings"]["gpus"] == 64
    assert command(words).code == 2  # the output exists
    assert command(f"{words} --overwrite").code == 0


def test_what_cannot_be_planned_is_one_line(command, monkeypatch):
    for options, code, reason in [
        ("--plan.model esm2_t48_15B --plan.gpu A100-40GB", 4, "raise plan.stage or plan.gpus"),
        ("--plan.gpu abacus", 2, "'abacus' has no known peak in bf16; use one of B200, H200 NVL"),
        ("--plan.gpu rtx4090", 2, "(did you mean GeForce RTX 4090?)"),
        ("--plan.gpu T4", 2, "has no known peak in bf16"),
        ("--plan.interconnect tape", 2, "plan.interconnect"),
        ("--plan.model esm2_t7", 2, "model.backbone.source"),
    ]:
        assert command.refused(code, reason, f"train plan {options}").out == ""
    monkeypatch.setattr(scale, "MTBF_GPU_HOURS", 0.001)
    assert command.refused(4, "there is no time to train", "train plan").out == ""


def test_what_binds_is_named(command):
    for options, binds in [
        ("--plan.gpus 512 --plan.interconnect 1", "interconnect"),
        ("--plan.gpus 1 --plan.model esm2_t6_8M --plan.compile false", "memory bandwidth"),
    ]:
        assert f"binds            {binds}\n" in command.done(f"train plan {options}").out
