"""Options of a tool that runs a classifier."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from pydantic import Field

from common.arguments import ToolArguments

if TYPE_CHECKING:
    from inference.classifier import ClassifierPipeline
    from train_config.schema import Config


class PipelineOptions(ToolArguments):
    """Classifier, device, precision and token budget."""

    model: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")] = Field(
        description="Exported classifier, or a run that has one."
    )
    device: str | None = Field(None, description="cpu, cuda, cuda:1 ... Default: CUDA where there is one.")
    amp_dtype: Literal["fp32", "bf16", "fp16"] = Field("fp32", description="Precision of the computation.")
    batch_tokens: int = Field(8192, gt=0, description="Token budget of a batch; a longer text goes alone.")


def load_pipeline(options: PipelineOptions, config: Config) -> ClassifierPipeline:
    """The classifier that the options name, with the run's settings."""
    from inference.classifier import ClassifierPipeline  # here, so that --help and a wrong option answer at once

    return ClassifierPipeline.load(
        options.model,
        config=config,
        device=options.device,
        amp_dtype=options.amp_dtype,
        batch_tokens=options.batch_tokens,
    )
