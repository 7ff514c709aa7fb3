"""Say what of the GPU stack is there and fits together; --verify trains two steps on it.

Prints a line for each of torch, CUDA, cuDNN, NCCL, NVML, DeepSpeed, its kernels and Ray: what it sees of this machine,
a verdict (ok, missing, mismatch) and what to do. Starts no cluster. Without a GPU it says so; nothing is wrong then.

--verify trains two steps of a tiny ESM-2 as training would: in bf16 and fp16 on a GPU, in bf16 and fp32 on the CPU
where there is none. It leaves with 4 if a step fails, or if there is a GPU that torch can't use, else with 0.

Examples:
  python -m tools gpu_check
  python -m tools gpu_check --verify
  python -m tools gpu_check --verify && python train_ray.py --config train_config/masked_lm.yaml
"""

from __future__ import annotations

from typing import Annotated

import tyro
from pydantic import Field

from common.arguments import ToolArguments, parse
from common.errors import ResourceError
from tools._gpu_check.finding import first_line, note_if_slow
from tools._gpu_check.parts import findings


class Arguments(ToolArguments):
    """Whether to look only, or to train as well."""

    verify: Annotated[bool, tyro.conf.FlagCreatePairsOff] = Field(
        False, description="Train two steps in each precision, and leave with 4 if that fails."
    )


def main(argv: list[str]) -> int:
    """Print what is seen; train if asked."""
    arguments = parse(Arguments, argv, "gpu_check", __doc__)
    verdicts = {}
    for finding in findings():
        print(finding.line(), flush=True)
        verdicts[finding.part] = finding.verdict
    if not arguments.verify:
        return 0
    try:
        with note_if_slow("loading what training needs ..."):
            from tools._gpu_check.trial import verify
            from training.engine.device import choose_device
    except ImportError as error:
        raise ResourceError(f"no step can be trained: {first_line(error)}; see the lines above") from error
    works = verdicts["device"] == "ok"
    for finding in verify(choose_device(0)):
        print(finding.line(), flush=True)
        works = works and finding.verdict == "ok"
    return 0 if works else ResourceError.exit_code
