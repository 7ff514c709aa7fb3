"""Worker processes that measure one configuration after the other, and outlive what goes wrong in one.

They are Ray actors with a process group, placed and set up as those of training are. As starting them takes about ten
seconds, they are kept from trial to trial, and started anew where another number is needed or where the last ones
crashed, hung or can't be trusted any more.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Self

import ray
import torch
from ray.exceptions import OutOfMemoryError, RayActorError, RayError, RayTaskError

from cluster import connection
from cluster.placement import Workers, place_workers
from cluster.process_group import addresses, join, listen
from common.errors import EsmerayError, ResourceError
from model.device import choose_device
from monitoring.sampling.host import memory_of_this_machine
from train_config.schema import Config, DataSection
from train_config.tune_schema import MeasurementSection
from training.engine.context import WorkerContext
from training.engine.deepspeed_settings import check_precision
from training.tasks.registry import stage
from tuning.settings import Measurement, Settings
from tuning.trial import FAILURES, PRUNE_MARGIN, measure_on_worker

GRACE_S = 2.0
"""Seconds that the other workers may take to end after one crashed: it may have left them inside a step."""

COLLECTIVE_TIMEOUT = timedelta(hours=12)
"""The pool ends workers that hang itself, by ``measurement.timeout_s``."""

PROCESS_ENDED = "a worker's process ended"


class MeasuringPool:
    """A group of worker processes that outlives trials. Ray is connected already.

    Args:
        config: the resolved config, with absolute paths. A classifier's tokenizer lies in the folder of its run.
        store_path: the prepared data.
        keep_global_tokens: see :meth:`~tuning.settings.Settings.applied`.
        inference: measure forward passes alone.
        trial: what every worker runs.
    """

    def __init__(
        self,
        config: Config,
        store_path: Path,
        *,
        keep_global_tokens: bool = True,
        inference: bool = False,
        trial: Callable[..., Measurement] = measure_on_worker,
    ) -> None:
        self._config, self._store_path = config, str(store_path)
        self._keep_global_tokens, self._inference = keep_global_tokens, inference
        self._trial = trial
        self._group: _Group | None = None
        self.starts = 0
        """Number of times that workers were started."""

    def measure(
        self,
        settings: Settings,
        measurement: MeasurementSection,
        best_tokens_per_s: float | None = None,
        prune_margin: float = PRUNE_MARGIN,
    ) -> Measurement:
        """Try these settings, as :func:`tuning.trial.measure_on_worker` does; what happens is a result.

        Raises ResourceError where the workers did not start.
        """
        try:
            config = settings.applied(self._config, self._keep_global_tokens)
            workers = place_workers(config.ray, connection.cluster_resources())
            if not self._inference:
                check_precision(config.training, workers.device)
        except EsmerayError as error:
            return Measurement("refused", str(error))
        group = self._ready(workers)
        began = time.monotonic()  # starting workers is no part of a trial
        call = partial(
            self._trial,
            config=_limited(config, group.most_on_a_node),
            store_path=self._store_path,
            measurement=measurement,
            best_tokens_per_s=best_tokens_per_s,
            prune_margin=prune_margin,
            inference=self._inference,
        )
        replies = group.measure(call, measurement.timeout_s)
        result = _summary(replies, measurement.timeout_s)
        in_step = all(reply is not None and reply.agreed for reply in replies)
        if not in_step or (result.status == "out_of_memory" and workers.use_gpu):  # whose memory is then fragmented
            self.close()
        return replace(result, seconds=time.monotonic() - began)

    def close(self) -> None:
        """End the workers."""
        if self._group is not None:
            self._group.kill()
            self._group = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ready(self, workers: Workers) -> _Group:
        if self._group is not None and self._group.workers != workers:
            self.close()
        if self._group is None:
            self._group = _Group(workers)
            self.starts += 1
            try:
                self._group.connect()
                if self._config.data.stage_dir is not None:
                    self._group.stage(self._store_path, self._config.model.task, self._config.data)
            except RayError as error:
                reason = _in_a_line(error)
                raise ResourceError(
                    f"the workers that measure did not start (is the cluster busy?): {reason}"
                ) from error
        return self._group


class _Group:
    """Actors of one process group."""

    def __init__(self, workers: Workers) -> None:
        self.workers = workers
        self.most_on_a_node = workers.count
        options: dict[str, Any] = {"num_cpus": workers.cpus_each, "num_gpus": int(workers.use_gpu), "max_restarts": 0}
        actor: Any = ray.remote(_MeasuringActor).options(runtime_env=connection.worker_environment(), **options)
        self._actors: list[Any] = [actor.remote(rank, workers) for rank in range(workers.count)]

    def connect(self) -> None:
        """Wait for the actors and make their process group. Raises RayError where some did not start."""
        nodes = ray.get([actor.node.remote() for actor in self._actors], timeout=connection.START_TIMEOUT_S)
        ids, own = [node for node, _ in nodes], addresses([address for _, address in nodes])
        self.most_on_a_node = max(Counter(ids).values())
        port = ray.get(self._actors[0].listen.remote(own[0]), timeout=connection.START_TIMEOUT_S)
        joining = [
            actor.join.remote((own[0], port), own[rank], local_rank=ids[:rank].count(ids[rank]))
            for rank, actor in enumerate(self._actors)
        ]
        ray.get(joining, timeout=connection.START_TIMEOUT_S)

    def stage(self, store_path: str, task: str, data: DataSection) -> None:
        """Copy the store to the disks of the nodes, however long that takes: a trial has only its timeout."""
        ray.get([actor.stage.remote(store_path, task, data) for actor in self._actors])

    def measure(self, call: Callable[..., Measurement], timeout_s: float) -> list[Measurement | None]:
        """Return each worker's measurement; None of those that did not end in time."""
        waiting = {actor.measure.remote(call): rank for rank, actor in enumerate(self._actors)}
        replies: list[Measurement | None] = [None] * len(self._actors)
        deadline = time.monotonic() + timeout_s
        while waiting and (left_s := deadline - time.monotonic()) > 0:
            done, _ = ray.wait(list(waiting), timeout=left_s)
            for reference in done:
                reply = replies[waiting.pop(reference)] = _reply(reference)
                if not reply.agreed:  # of those that agreed a machine under load may take its time to let go
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        return replies

    def kill(self) -> None:
        """End the processes, whatever they are doing."""
        for actor in self._actors:
            ray.kill(actor)


class _MeasuringActor:
    """One worker."""

    def __init__(self, rank: int, workers: Workers) -> None:
        torch.set_num_threads(workers.cpus_each)
        self._rank, self._workers = rank, workers
        self._context = WorkerContext(rank, workers.count)

    def node(self) -> tuple[str, str]:
        """Return the node's id and address. Loads what training needs, so that all workers do so at the same time."""
        import training.engine.deepspeed_setup
        import training.tasks.residues.experiment  # noqa: F401

        return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()

    def listen(self, address: str) -> int:
        """On worker 0; see :func:`~connection.process_group.listen`."""
        return listen(address, self._workers.count)

    def join(self, meeting: tuple[str, int], address: str, local_rank: int) -> None:
        """Become part of the process group."""
        from training.engine.deepspeed_setup import prepare_deepspeed

        # Ray shows an actor its own GPU alone, as the first one.
        device = choose_device(0)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        os.environ["LOCAL_RANK"] = str(device.index or 0)  # DeepSpeed asks for it
        self._context = WorkerContext(self._rank, self._workers.count, local_rank, device)
        backend = "nccl" if device.type == "cuda" else "gloo"
        join(meeting, self._rank, self._workers.count, address, backend, COLLECTIVE_TIMEOUT)
        prepare_deepspeed(device)  # may compile: not in the time of the first trial

    def stage(self, store_path: str, task: str, data: DataSection) -> None:
        stage(task, data, Path(store_path))

    def measure(self, call: Callable[..., Measurement]) -> Measurement:
        try:
            return call(context=self._context)
        except EsmerayError as error:
            return Measurement("crash" if error.retryable else "refused", str(error), agreed=False)
        except Exception as error:  # noqa: BLE001 - a result, too
            return Measurement("crash", f"{type(error).__name__}: {_in_a_line(error)}", agreed=False)


def _limited(config: Config, workers_on_a_node: int) -> Config:
    """Without a limit of its own, a worker on the CPU may take its part of the machine's memory."""
    if config.training.cpu_memory_limit_mib is not None:
        return config
    limit_mib = memory_of_this_machine().total / workers_on_a_node / 2**20
    training = config.training.model_copy(update={"cpu_memory_limit_mib": limit_mib})
    return config.model_copy(update={"training": training})


def _reply(reference: Any) -> Measurement:
    try:
        return ray.get(reference)
    except OutOfMemoryError as error:
        reason = f"out of memory: Ray ended the worker ({_in_a_line(error)})"
        return Measurement("out_of_memory", reason, agreed=False)
    except (RayActorError, RayTaskError) as error:
        return Measurement("crash", f"{PROCESS_ENDED} ({_in_a_line(error)})", agreed=False)


def _summary(replies: list[Measurement | None], timeout_s: float) -> Measurement:
    """One result from those of the workers."""
    known = [reply for reply in replies if reply is not None]
    failed = [reply for reply in known if reply.status not in ("ok", "pruned")]
    if not failed:
        hung = Measurement("timeout", f"a worker did not end within {timeout_s:g} s")
        return known[0] if len(known) == len(replies) else hung
    # Where a process ended, the others lost their peer; where a worker has no reason, another one has it.
    worst = max(
        failed,
        key=lambda reply: (FAILURES.index(reply.status), reply.reason.startswith(PROCESS_ENDED), bool(reply.reason)),
    )
    peaks = [reply.peak_memory_bytes for reply in known if reply.peak_memory_bytes is not None]
    return replace(worst, peak_memory_bytes=max(peaks, default=None))


def _in_a_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
