"""Plan a run on a cluster: memory, speed, scaling, checkpoints, faults, days, and the bottleneck.

Nothing is trained and no GPU is needed. The formulas with their sources and the assumptions are in
esmeray/training/launch/scale.py; docs/gpu.md compares them with published runs. Set --plan.assume.mfu to throughput/mfu
of a run of yours. The baseline for linear scaling is one node with the same tokens per GPU, or one GPU if all GPUs are
in one node.

Examples:
  esmeray train plan --plan.model esm2_t48_15B --plan.gpus 64 --plan.gpu h200 --plan.interconnect ib400
  esmeray train plan --plan.model esm2_t36_3B --plan.gpus 16 --plan.gpu a100 --plan.gradient_checkpointing selective
  esmeray train plan --plan.gpus 32 --plan.stage 3 --plan.json_output plan.json
"""

import math
from typing import Any

from esmeray.common.errors import ConfigError, ResourceError, did_you_mean, expanded
from esmeray.common.text import counted, duration
from esmeray.model.section import BackboneSection
from esmeray.tasks.section import ModelSection
from esmeray.tools.grammar import OutputWriter, command
from esmeray.training.launch import scale
from esmeray.training.launch.scale import PlanSection

MIN_TOKENS = 1024
"""Minimum token budget, so that the longest proteins of ESM-2's training fit into a batch."""


@command("train plan", __doc__, made_by="train plan")
def main(plan: PlanSection, writer: OutputWriter) -> None:
    if plan.stage == 1:  # as esmeray/training/engine/engine.py does
        plan = plan.model_copy(update={"stage": 2})
    if plan.stage == 3 and plan.optimizer == "muon":
        raise ConfigError("plan.optimizer muon: under ZeRO-3 no worker has a complete matrix: set plan.stage to 2")
    output = expanded(plan.json_output) if plan.json_output else None
    writer.refuse_file(output)
    scaled = scale_run(work_of(plan), plan, device_of(plan))
    print("\n".join(lines(plan, scaled)))
    writer.write_json(output, {"settings": plan.model_dump(mode="json"), **scaled})


def work_of(plan: PlanSection) -> scale.Work:
    """Cost per token of training the model as a masked language model. Raises ConfigError or ResourceError."""
    from esmeray.model.cost.flops import (
        training_flops_per_token,  # imported here: it loads torch and transformers
    )
    from esmeray.model.cost.memory import count_parameters
    from esmeray.tasks.masked_lm.model import MaskedLM

    # Empty: create the shapes of the parameters only, without memory for up to 15 billion of them.
    section = ModelSection(task="masked_lm", backbone=BackboneSection(source=plan.model))
    model = MaskedLM.build(section, seed=0, empty=True)
    product_flops = training_flops_per_token(model, 0.0)
    return scale.Work(
        count_parameters(model),
        model.backbone.config.num_hidden_layers,
        model.backbone.config.hidden_size,
        product_flops,
        training_flops_per_token(model, plan.context) - product_flops,
    )


def device_of(plan: PlanSection) -> scale.Device:
    """Peaks of the GPU. Raises ConfigError if they are not known."""
    from esmeray.monitoring.sampling.peaks import known_gpus, known_peaks, peak_tflops  # imported here: loads torch

    peaks, peak = known_peaks(plan.gpu), peak_tflops(plan.gpu, scale.PRECISION)
    if peaks is None or peak is None:
        gpus = known_gpus(scale.PRECISION)
        raise ConfigError(
            f"plan.gpu: {plan.gpu!r} has no known peak in {scale.PRECISION}{did_you_mean(plan.gpu, gpus)}; use one of "
            f"{', '.join(gpus)}"
        )
    memory = (peaks.memory_gb, peaks.memory_gb_per_s, peaks.link_gb_per_s)
    return scale.Device(1e12 * peak, *(1e9 * value for value in memory))


def scale_run(work: scale.Work, plan: PlanSection, device: scale.Device) -> dict[str, Any]:
    """Return the values of the plan, named with their units.

    Raises ResourceError if no micro-batch fits into memory, or if faults leave no time to train.
    """
    largest = scale.largest_tokens(work, plan, device)
    if largest < MIN_TOKENS:
        state = ", ".join(f"{name} {_gb(size)}" for name, size in scale.memory_parts(work, plan, 0).items() if size)
        raise ResourceError(
            f"{_gb(device.memory_bytes)} can't hold {MIN_TOKENS:,} tokens of {plan.model} next to {state}: "
            "raise plan.stage or plan.gpus, or set plan.gradient_checkpointing true"
        )
    # The smallest budget, in units of 64, that needs no more micro-batches than the largest one: the largest would
    # leave a short last micro-batch.
    share = math.ceil(plan.global_tokens / plan.gpus)
    micro_batches = math.ceil(share / largest)
    tokens = max(MIN_TOKENS, 64 * math.ceil(share / micro_batches / 64))
    step_tokens, memory = tokens * micro_batches * plan.gpus, scale.memory_parts(work, plan, tokens)
    parts = scale.step_parts(work, plan, device, plan.gpus, tokens, micro_batches)
    # The baseline is one node, because scaling shows the cost of communication between nodes, without NVLink.
    reference = scale.GPUS_PER_NODE if plan.gpus > scale.GPUS_PER_NODE else 1
    linear_s = sum(scale.step_parts(work, plan, device, reference, tokens, micro_batches).values())
    step_s, mtbf_s = sum(parts.values()), 3600 * scale.MTBF_GPU_HOURS / plan.gpus
    whole, first = scale.checkpoint_bytes(work, plan)
    write_s, stall_s = whole / scale.STORAGE_BYTES_PER_S, first / scale.HOST_BYTES_PER_S
    # A checkpoint waits until the previous one is written, and there is at most one per step.
    interval_s = max(scale.daly_interval_s(stall_s, mtbf_s), write_s, step_s)
    # A fault costs write_s twice: to read the last checkpoint, and to repeat the work done while the next one was being
    # written.
    lost = scale.lost_share(interval_s, stall_s, scale.RESTART_S + 2 * write_s, mtbf_s)
    if lost > 0.99:
        raise ResourceError(f"with a fault every {mtbf_s:.0f} s there is no time to train: lower plan.gpus")
    faults = 1 - math.exp(-scale.RESTART_S / mtbf_s)  # the share lost if checkpoints cost nothing
    shares = {name: (1 - lost) * seconds / step_s for name, seconds in parts.items()}
    shares |= {"disk": lost - faults, "faults": faults}
    training_s = scale.TOTAL_TOKENS / step_tokens * step_s / (1 - lost)
    return {
        "parameters": work.parameters.total,
        "gpu_memory_bytes": device.memory_bytes,
        "memory_bytes": sum(memory.values()),
        "memory_parts_bytes": memory,
        "largest_tokens": largest,
        "tokens": tokens,
        "micro_batches": micro_batches,
        "global_tokens": step_tokens,
        "step_s": step_s,
        "step_parts_s": parts,
        "tokens_per_s": step_tokens / step_s,
        "mfu": tokens * micro_batches * (work.product_flops + work.attention_flops) / step_s / device.flops_per_s,
        "share_of_linear": linear_s / step_s,
        "checkpoint_bytes": whole,
        "checkpoint_write_s": write_s,
        "checkpoint_stall_s": stall_s,
        "mtbf_s": mtbf_s,
        "young_interval_s": scale.young_interval_s(stall_s, mtbf_s),
        "interval_s": interval_s,
        "lost_share": lost,
        "training_s": training_s,
        "gpu_hours": plan.gpus * training_s / 3600,
        "shares": shares,
        "binds": max(shares, key=lambda name: shares[name]),
    }


def lines(plan: PlanSection, scaled: dict[str, Any]) -> list[str]:
    """Lines of the report, which fits on one screen."""
    mfu, bound = plan.assume.mfu, scaled["shares"].items()
    nodes, days = counted(math.ceil(plan.gpus / scale.GPUS_PER_NODE), "node{s}"), scaled["training_s"] / 86400
    rates = f"matrix products {scale.PRODUCTS:.0%}, attention {scale.ATTENTION:.0%}, memory {scale.MEMORY:.0%} of peak"
    cluster = f"{plan.gpus:,} x {plan.gpu}, {nodes}, {plan.interconnect}, ZeRO-{plan.stage}, {scale.PRECISION}"
    cluster += ", Muon" if plan.optimizer == "muon" else ""
    return [
        f"model            {plan.model}, {scaled['parameters'] / 1e9:,.3g} billion parameters",
        f"cluster          {cluster}",
        f"memory per GPU   {_gb(scaled['memory_bytes'])} of {_gb(scaled['gpu_memory_bytes'])}",
        f"                 {', '.join(f'{name} {_gb(size)}' for name, size in scaled['memory_parts_bytes'].items())}",
        f"token budget     {scaled['tokens']:,}; {scaled['largest_tokens']:,} fit",
        f"tokens per step  {scaled['global_tokens']:,} in {counted(scaled['micro_batches'], 'micro-batch{es}')} "
        "per GPU",
        f"step             {scaled['step_s']:.3g} s, {scaled['tokens_per_s']:,.0f} tokens/s, "
        f"{scaled['tokens_per_s'] / plan.gpus:,.0f} per GPU, MFU {scaled['mfu']:.1%}",
        f"scaling          {scaled['share_of_linear']:.1%} of linear",
        f"checkpoint       {_gb(scaled['checkpoint_bytes'])}, written in {duration(scaled['checkpoint_write_s'])}; "
        f"steps wait {scaled['checkpoint_stall_s']:.2g} s",
        f"faults           one in {duration(scaled['mtbf_s'])}; {scaled['lost_share']:.2%} of the time is lost",
        f"best interval    {duration(scaled['interval_s'])}, {scaled['interval_s'] / scaled['step_s']:,.0f} steps "
        f"(Daly; Young: {duration(scaled['young_interval_s'])})",
        f"{scale.TOTAL_TOKENS:,.3g} tokens".ljust(17) + f"{days:,.1f} days, {scaled['gpu_hours']:,.0f} GPU-hours",
        f"binds            {scaled['binds']}",
        f"                 {', '.join(f'{name} {share:.1%}' for name, share in bound)}",
        f"assumed          {rates if mfu is None else f'MFU {mfu:.1%}'}",
        f"                 network {scale.NETWORK:.0%}, overlapping {scale.OVERLAP:.0%} of the backward pass",
    ]


def _gb(size_bytes: float) -> str:
    return f"{size_bytes / 1e9:,.1f} GB"
