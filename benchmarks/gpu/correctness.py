"""Whether the device computes what the CPU does, and nothing waits for it."""

import itertools
import subprocess
import sys
from collections.abc import Iterator

import torch

from esmeray.benchmarks.gpu.bench import Bench
from esmeray.benchmarks.harness.stage import REPOSITORY, Row


def correctness(bench: Bench) -> Iterator[Row]:
    """Loss, features and gradients on the device against fp32 on the CPU."""
    name = bench.sizes[0]
    batch = bench.work(2048)[0].batches[0]
    reference = bench.masked_lm(name, torch.float32).cpu()
    wanted = reference(batch.to("cpu"))
    # The CPU's fp32 is the reference, since the tests hold it to transformers.
    wanted.loss_sum.backward()
    wanted_grads = torch.cat([p.grad.flatten() for p in reference.parameters() if p.grad is not None])
    for dtype, compiled in itertools.product((torch.float32, torch.bfloat16), (False, True)):
        model = bench.masked_lm(name, dtype)
        if compiled:
            model.backbone.compile_layers(bench.backend)
        output = model(batch)
        output.loss_sum.backward()
        grads = torch.cat([p.grad.flatten().float().cpu() for p in model.parameters() if p.grad is not None])
        difference = abs(float(output.loss_sum.detach()) / float(wanted.loss_sum.detach()) - 1)
        # Of all gradients as one vector: single ones are near zero, where relative differences mean nothing.
        cosine = float(torch.nn.functional.cosine_similarity(grads, wanted_grads, dim=0))
        least, most = (0.999, 1e-2) if dtype == torch.bfloat16 else (0.999999, 1e-4)
        yield {
            "model": name,
            "dtype": str(dtype).removeprefix("torch."),
            "layers": "compiled" if compiled else "eager",
            "loss, relative difference": difference,
            "cosine of the gradients": cosine,
            "verdict": "ok" if cosine >= least and difference <= most else "WRONG",
        }
    yield {"model": name, "layers": "no wait in a step", "verdict": _waits_nowhere(bench, name)}
    if bench.device == "cuda":
        command = [sys.executable, "-m", "pytest", "-m", "cuda", "--continue-on-collection-errors", "tests/model"]
        # Also where some can't be collected: a machine for one check need not have Ray and DeepSpeed.
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=180)
        words = ["ok" if done.returncode == 0 else "WRONG", *done.stdout.strip().splitlines()[-1:]]
        yield {"layers": "tests marked cuda", "verdict": " ".join(words)}


def _waits_nowhere(bench: Bench, name: str) -> str:
    """Whether a step runs under torch's mode that forbids to wait for the device."""
    if bench.device != "cuda":
        return "not on this device"
    model = bench.masked_lm(name, torch.bfloat16)
    batch = bench.work(2048)[0].batches[0]
    model(batch).loss_sum.backward()  # what is set up once
    torch.cuda.set_sync_debug_mode("error")
    try:
        model(batch).loss_sum.backward()
    except RuntimeError as error:
        return f"WRONG: {str(error).splitlines()[0]}"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return "ok"
