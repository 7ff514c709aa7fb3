"""The plan of a run, as --dry_run prints it; computed from the config and the sizes of data and model."""

from dataclasses import dataclass

from esmeray.cluster.placement import Workers
from esmeray.common.errors import ConfigError
from esmeray.common.text import counted
from esmeray.dataset.section import BatchSection
from esmeray.model.cost.memory import MemoryEstimate, estimate_memory
from esmeray.tasks.plan import DataSize, TaskPlan, TaskSize
from esmeray.training.engine.deepspeed_settings import zero_stage
from esmeray.training.section import DeepSpeedSection, TrainingSection


@dataclass(frozen=True)
class Plan:
    """Devices, steps and memory of a run."""

    workers: Workers
    data: DataSize
    batch: BatchSection
    training: TrainingSection
    stage: int
    memory: MemoryEstimate
    steps_per_epoch: int

    @property
    def total_steps(self) -> int:
        return self.training.max_steps or self.training.epochs * self.steps_per_epoch + self.batch.more_steps

    def lines(self) -> list[str]:
        """Return the plan as lines of text."""
        about = "" if self.data.exact else "about "
        changes = [] if self.data.counts is None else self.data.counts.lines()
        memory, batch = self.memory, self.batch
        tokens_per_step = f"{batch.global_tokens:,} in {counted(batch.batches_per_step, 'packed batch{es}')}"
        if batch.first_global_tokens is not None:
            tokens_per_step += (
                f", ramped up from {batch.first_global_tokens:,} over the first {batch.ramp_steps:,} steps"
            )
        if batch.batch_size is not None:
            tokens_per_step = f"at most {tokens_per_step} with at most {counted(batch.batch_size, 'sequence{s}')}"
        return [
            f"workers          {self.workers.numbers} x {self.workers.device}, {self.workers.cpus_each} CPU cores each",
            f"precision        {self.training.precision}",
            f"training data    {about}{counted(self.data.sequences, 'sequence{s}')}, {self.data.tokens:,} tokens",
            f"held out         {about}{counted(self.data.held_out, 'sequence{s}')}",
            *(f"                 {line}" for line in changes),
            *([f"                 {self.data.unknown}"] if self.data.unknown else []),
            *([f"labels           {self.data.labels}"] if self.data.labels else []),
            f"cropped          {about}{counted(self.data.cropped.sequences, 'sequence{s}')}, "
            f"{counted(self.data.cropped.residues, 'residue{s}')} cropped per epoch",
            f"tokens per step  {tokens_per_step}",
            f"steps per epoch  about {self.steps_per_epoch:,}",
            f"total steps      {'' if self.training.max_steps else 'about '}{self.total_steps:,}",
            f"parameters       {memory.parameters.total:,}, {memory.parameters.trainable:,} trainable",
            f"device memory    {_mib(memory.parameter_bytes)} weights, {_mib(memory.gradient_bytes)} gradients, "
            f"{_mib(memory.optimizer_bytes)} optimizer (ZeRO-{self.stage}), plus activations",
            *(
                [f"host memory      {_mib(memory.host_optimizer_bytes)} optimizer per worker"]
                if memory.host_optimizer_bytes
                else []
            ),
        ]


def make_plan(
    batch: BatchSection, training: TrainingSection, deepspeed: DeepSpeedSection, workers: Workers, size: TaskSize
) -> Plan:
    """Compute the plan. Raises ConfigError if DeepSpeed's settings are wrong."""
    data = size.data
    stage = zero_stage(training, deepspeed)
    steps_per_epoch = max(1, -(-data.tokens // batch.global_tokens))
    # Short sequences may reach the limit on sequences before the token budget.
    if batch.batch_size is not None:
        steps_per_epoch = max(steps_per_epoch, -(-data.sequences // (batch.batch_size * batch.batches_per_step)))
    memory = estimate_memory(
        size.parameters,
        stage=stage,
        world_size=workers.allowed[0],  # with fewer workers each holds more of the state
        precision=training.precision,
        offload_optimizer=deepspeed.offload_optimizer,
        optimizer=training.optimizer,
        weight_mean=training.weight_mean is not None,
    )
    return Plan(workers, data, batch, training, stage, memory, steps_per_epoch)


def check_warm_up(training: TrainingSection, total_steps: int) -> None:
    """Raise ConfigError if the warm-up is as long as the run."""
    if (warmup_steps := training.warmup_steps or 0) >= total_steps:
        end = "max_steps" if training.max_steps else "epochs"
        default = ", or give --training.warmup_steps none to use a tenth of the steps"
        raise ConfigError(
            f"training.warmup_steps ({warmup_steps}) must be less than the {total_steps} steps of "
            f"training.{end}: lower it{'' if training.schedule == 'wsd' else default}"
        )


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:,.1f} MiB"


def check_task(
    task: TaskPlan, training: TrainingSection, deepspeed: DeepSpeedSection, *, is_begun: bool = False
) -> None:
    """Raise ConfigError for ZeRO-3 with a padded backbone, and for adapters that the task would not train.

    ``is_begun``: the run has checkpoints, or the search has trials. An earlier version may have ignored the adapters,
    and it can still resume.
    """
    rank = task.model.backbone.lora.rank
    if rank and not (task.trains_adapters or is_begun):
        raise ConfigError(
            f"model.backbone.lora.rank {rank}: model.task {task.model.task} trains no adapters with these settings; "
            "set rank to 0"
        )
    if zero_stage(training, deepspeed) == 3 and task.padded:
        raise ConfigError(
            "deepspeed.stage 3: a padded backbone runs once per group of similar lengths. Workers have "
            "different numbers of groups, so they would wait for each other forever: use stage 2"
        )
