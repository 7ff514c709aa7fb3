"""Two workers of training on this machine, beside their plan (``esmeray train plan``).

The plan is given what is measured in the same round: the rate of a bf16 matrix product, the speed of gloo's all-reduce
of as many bytes as the gradients, and MFU and spread of the steps of two workers that train side by side, each alone,
so that they share cores and memory as two together do. Left to predict is what workers lose to each other: gradients
reduced, weights gathered, the slower one waited for. The plan has to be near from above and from below: two floors.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import mean, median, pstdev
from typing import Any

import torch
import torch.distributed as dist

from esmeray.benchmarks.harness.models import random_network
from esmeray.benchmarks.harness.proteins import read_proteins
from esmeray.benchmarks.harness.stage import Case, Comparison, Contender, Facts, Setting, Stage
from esmeray.benchmarks.programs.processes import begun
from esmeray.benchmarks.programs.training_workload import TOY, Workload
from esmeray.benchmarks.stages.training import prepare
from esmeray.common.timing import median_seconds
from esmeray.model.device import DTYPES
from esmeray.monitoring.sampling.peaks import product_flops_per_s
from esmeray.tools.train.plan import device_of, scale_run, work_of
from esmeray.train_config.section import ComputeSection
from esmeray.training.launch.scale import PlanAssumptions, PlanSection

TOGETHER, PLANNED = "two workers", "their plan"
MODEL, TOKENS, STEPS, ROUNDS = "esm2_t6_8M", 2048, (2, 10), 9
TRAIN, CONSTANTS = "esmeray.benchmarks.programs.worker_alone:train", "esmeray.benchmarks.stages.plan:constants"


def _cases(setting: Setting) -> Iterator[Case]:
    if setting.device == "cpu":
        proteins = read_proteins(setting.fasta)
        base = prepare(setting, proteins, random_network(MODEL, **(TOY if setting.quick else {})))
        warmup_steps, steps = (1, 2) if setting.quick else STEPS
        pair = Pair(replace(base, tokens=TOKENS, warmup_steps=warmup_steps, steps=steps), setting.folder.resolve())
        pair.facts |= {**proteins.facts, "model": MODEL, "tokens of a micro-batch": TOKENS}
        runs = Contender(TOGETHER, pair.train, kind="value"), Contender(PLANNED, pair.plan, kind="value")
        yield Case(TOGETHER, "tokens/s", runs, rounds=ROUNDS, facts=pair.facts)


class Pair:
    """Runs of two processes; ``facts`` gets what the last plan was given."""

    def __init__(self, workload: Workload, folder: Path) -> None:
        self._workload = workload
        self._folder = folder
        self._number = 0
        self.facts: Facts = {}

    def train(self) -> float:
        """Tokens a second of two workers of one run."""
        run: dict[str, Any] = {"workload": replace(self._workload, accumulation=2), "folder": self._new()}
        meeting = self._new()
        tokens, seconds, _ = self._steps(*({**run, "rank": rank, "meeting": meeting} for rank in range(2)))
        return tokens / seconds

    def plan(self) -> float:
        """Tokens a second by a plan of what is measured here."""
        work = replace(self._workload, accumulation=1)
        # Side by side, though each alone: they share cores, caches and memory as two workers of a run do.
        tokens, seconds, spread = self._steps(*({"workload": work, "folder": self._new()} for _ in range(2)))
        plan = PlanSection(model=work.weights, gpus=2, gpus_per_node=1, tokens=TOKENS, global_tokens=2 * TOKENS)
        cost = work_of(plan)
        shared = {"meeting": self._new(), "elements": cost.parameters.trainable}
        measured = _both(CONSTANTS, *({"rank": rank, **shared} for rank in range(2)))
        tflops, gbit_per_s = (mean(values) for values in zip(*measured, strict=True))
        # Against the product that was measured in this round, which is what the plan is given as the peak.
        mfu = tokens * (cost.product_flops + cost.attention_flops) / seconds / (1e12 * tflops)
        self.facts |= {"TFLOP/s": tflops, "Gbit/s": gbit_per_s, "MFU alone": mfu, "spread of steps": spread}
        # The optimizer is in the MFU, and memory is no matter: what these are given changes nothing.
        assume: dict[str, float] = {"memory_gb": 64.0, "memory_gb_per_s": 1e6, "link_gb_per_s": 1e6, "network": 1.0}
        assume |= {"mfu": mfu, "overlap": 0.0, "jitter": spread, "peak_tflops": tflops}
        plan = plan.model_copy(update={"interconnect": gbit_per_s, "assume": PlanAssumptions.model_validate(assume)})
        return 2 * tokens / float(scale_run(cost, plan, device_of(plan))["step_s"])

    def _steps(self, *processes: dict[str, Any]) -> tuple[float, float, float]:
        """Tokens and seconds of a measured step, and the spread of the seconds as a share of them."""
        runs = _both(TRAIN, *({**own, "threads": 1} for own in processes))
        # Of both: a run is as fast as the slower one, and the spread says how far they are apart.
        steps = [step for run in runs for step in run[self._workload.warmup_steps :]]
        seconds = [step["seconds"] for step in steps]
        return mean(step["tokens"] for step in steps), median(seconds), pstdev(seconds) / mean(seconds)

    def _new(self) -> str:
        # A file to meet at is left behind, and must not be met at again.
        self._number += 1
        return str(self._folder / f"plan-{self._number}")


def _both(function: str, *processes: dict[str, Any]) -> list[Any]:
    """Results of a function in two processes at once."""
    with ExitStack() as stack:
        # Both begun before either is waited for.
        results = [stack.enter_context(begun(function, **arguments)) for arguments in processes]
        return [result() for result in results]


def constants(rank: int, meeting: str, elements: int) -> tuple[float, float]:
    """TFLOP/s of a product on one thread, and Gbit/s of gloo's all-reduce of so many bf16 elements."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    # A processor without instructions for bf16 is thirty times slower at its products, and trains in fp32.
    flops_per_s = product_flops_per_s("cpu", DTYPES[ComputeSection().resolved(False).precision], 1024)
    gradients = torch.zeros(elements, dtype=torch.bfloat16)
    # Of two workers each sends as many bytes as it has: two passes of half of them.
    return flops_per_s / 1e12, 8e-9 * gradients.nbytes / median_seconds(lambda: dist.all_reduce(gradients))


STAGE = Stage(
    name="plan",
    summary="two workers on this machine, beside their plan",
    cases=_cases,
    comparisons=(
        Comparison(TOGETHER, TOGETHER, PLANNED, {"cpu": 0.9}),
        Comparison(TOGETHER, PLANNED, TOGETHER, {"cpu": 0.9}, label="their plan"),
    ),
    packages=("deepspeed",),
    distributions=("deepspeed",),
)
