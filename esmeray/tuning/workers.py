"""Worker processes that measure one configuration after the other, and survive failures of single trials.

They are Ray actors with a process group, set up like training workers, each in a bundle of the trial's placement group.
Starting them takes about ten seconds, so they stay for the next trial.
"""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import ray
import torch
from ray.exceptions import OutOfMemoryError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from esmeray.cluster import connection
from esmeray.cluster.collective import WorkerContext
from esmeray.cluster.placement import Workers
from esmeray.cluster.process_group import addresses, join, listen
from esmeray.common.errors import EsmerayError, ResourceError, last_line
from esmeray.model.device import choose_device
from esmeray.monitoring.sampling.host import memory_of_this_machine
from esmeray.tasks.experiment import experiment_class
from esmeray.tasks.section import ModelSection
from esmeray.tuning.records import Job, Measurement, Settings, StoppedError
from esmeray.tuning.trial import FAILURES, measure_on_worker

GRACE_S = 2.0
"""Seconds that the other workers may take to end after one crashed; they may be stuck inside a step."""

POLL_S = 0.5

COLLECTIVE_TIMEOUT = timedelta(hours=12)
"""Longer than any trial: ``measurement.timeout_s`` ends workers that hang."""

PROCESS_ENDED = "a worker's process ended"
NODE_DIED = "its node has died"
"""Part of the message of Ray (2.60), which identifies this error in no other way."""


class WorkerGroup:
    """Actors of one process group, in the placement group of the process that creates them.

    Staged data is copied to the nodes' disks now, since the copy would count towards a trial's timeout. Raises
    ResourceError if the actors don't start.
    """

    def __init__(self, workers: Workers, job: Job, measure: Callable[..., Measurement] = measure_on_worker) -> None:
        self._workers = workers
        self._job = job
        self._measure = measure
        actor: Any = ray.remote(_MeasuringActor)
        self._actors: list[Any] = [
            actor.options(**_options(workers, rank)).remote(rank, workers) for rank in range(workers.count)
        ]
        try:
            self._connect()
            if job.config.data.stage_dir is not None:
                staging = (job.store_path, job.config.model, job.config.data.stage_dir)
                ray.get([actor.stage.remote(*staging) for actor in self._actors])
        except RayError as error:
            self.close()
            raise ResourceError(f"the measuring workers did not start: {last_line(error)}") from error

    def measure(self, settings: Settings) -> Measurement:
        """Measure these settings as :func:`esmeray.tuning.trial.measure_on_worker`. Failures are results as well.

        After a failure the group must be closed. Raises StoppedError once the search is to stop.
        """
        began = time.monotonic()  # starting workers is not part of a trial
        search = self._job.search
        try:
            config = self._job.trial_config(settings)
        except EsmerayError as error:
            return Measurement("refused", str(error))
        if config.training.cpu_memory_limit_mib is None:
            # Without a limit in the config, a worker on the CPU may use its share of the machine's memory.
            limit_mib = memory_of_this_machine().total / self._most_on_a_node / 2**20
            training = config.training.model_copy(update={"cpu_memory_limit_mib": limit_mib})
            config = config.model_copy(update={"training": training})
        call = partial(
            self._measure,
            config=config,
            store_path=self._job.store_path,
            measurement=search.measurement,
        )
        timeout_s = search.measurement.timeout_s
        replies = self._replies([actor.measure.remote(call) for actor in self._actors], timeout_s)
        return replace(_summary(replies, timeout_s), seconds=time.monotonic() - began)

    def close(self) -> None:
        """End the processes, whatever they are doing."""
        for actor in self._actors:
            ray.kill(actor)

    def _connect(self) -> None:
        """Wait for the actors and create their process group."""
        nodes = ray.get([actor.node.remote() for actor in self._actors], timeout=connection.START_TIMEOUT_S)
        ids = [node for node, _ in nodes]
        own = addresses([address for _, address in nodes])
        self._most_on_a_node = max(Counter(ids).values())
        port = ray.get(self._actors[0].listen.remote(own[0]), timeout=connection.START_TIMEOUT_S)
        # Started together and waited for together: each joins only when all others do.
        joining = [
            actor.join.remote((own[0], port), own[rank], local_rank=ids[:rank].count(ids[rank]))
            for rank, actor in enumerate(self._actors)
        ]
        ray.get(joining, timeout=connection.START_TIMEOUT_S)

    def _replies(self, references: list[Any], timeout_s: float) -> list[Measurement | None]:
        """Return each worker's measurement; None for workers that did not end in time."""
        waiting = {reference: rank for rank, reference in enumerate(references)}
        replies: list[Measurement | None] = [None] * len(references)
        deadline = time.monotonic() + timeout_s
        while waiting and time.monotonic() < deadline:
            if self._job.folder.stop_request.exists():
                raise StoppedError
            done, _ = ray.wait(list(waiting), timeout=min(max(0.0, deadline - time.monotonic()), POLL_S))
            for reference in done:
                reply = replies[waiting.pop(reference)] = _reply(reference)
                if reply.status != "ok":
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        return replies


class _MeasuringActor:
    """One worker; its methods correspond to the group's."""

    def __init__(self, rank: int, workers: Workers) -> None:
        torch.set_num_threads(workers.cpus_each)  # by default torch uses every core of the machine
        self._rank = rank
        self._workers = workers
        self._context = WorkerContext(rank, workers.count)

    def node(self) -> tuple[str, str]:
        """Return the node's id and address."""
        return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()

    def listen(self, address: str) -> int:
        return listen(address, self._workers.count)

    def join(self, meeting: tuple[str, int], address: str, local_rank: int) -> None:
        from esmeray.training.engine.deepspeed_setup import prepare_deepspeed

        # Ray makes only the actor's own GPU visible, as the first one.
        device = choose_device()
        if device.type == "cuda":
            torch.cuda.set_device(device)
        self._context = WorkerContext(self._rank, self._workers.count, local_rank, device)
        backend = "nccl" if device.type == "cuda" else "gloo"
        join(meeting, self._rank, self._workers.count, address, backend, COLLECTIVE_TIMEOUT)
        prepare_deepspeed(device)  # may compile operators, outside the first trial's time

    def stage(self, store_path: str, model: ModelSection, stage_dir: str) -> None:
        experiment_class(model).stage(Path(store_path), Path(stage_dir))

    def measure(self, call: Callable[..., Measurement]) -> Measurement:
        try:
            return call(context=self._context)
        except EsmerayError as error:
            return Measurement("crash" if error.retryable else "refused", str(error))
        except Exception as error:  # noqa: BLE001 - also a result
            return Measurement("crash", f"{type(error).__name__}: {last_line(error)}")


def _options(workers: Workers, rank: int) -> dict[str, Any]:
    group = get_current_placement_group()
    return {
        "num_cpus": workers.cpus_each,
        "num_gpus": int(workers.use_gpu),
        "max_restarts": 0,  # a restarted process would have no process group
        # In the bundle of its rank, which the trial reserved; outside a trial on any node with free resources.
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group, rank) if group is not None else "DEFAULT",
        "runtime_env": connection.worker_environment(),
    }


def _reply(reference: Any) -> Measurement:
    try:
        return ray.get(reference)
    except OutOfMemoryError as error:
        return Measurement("out_of_memory", f"out of memory: Ray killed the worker ({last_line(error)})")
    except (RayActorError, RayTaskError) as error:
        if NODE_DIED in str(error):  # not caused by any setting
            raise ResourceError("a machine of the cluster was lost; resume the search with the same command") from error
        return Measurement("crash", f"{PROCESS_ENDED} ({last_line(error)})")


def _summary(replies: list[Measurement | None], timeout_s: float) -> Measurement:
    """Return one result from the results of the workers."""
    known = [reply for reply in replies if reply is not None]
    failed = [reply for reply in known if reply.status != "ok"]
    if not failed:
        hung = Measurement("timeout", f"a worker did not finish within {timeout_s:g} s")
        return known[0] if len(known) == len(replies) else hung
    # If a process ended, the others lost their peer and report a crash without its cause.
    worst = max(failed, key=lambda reply: (FAILURES.index(reply.status), reply.reason.startswith(PROCESS_ENDED)))
    peaks = [reply.peak_memory_bytes for reply in known if reply.peak_memory_bytes is not None]
    return replace(worst, peak_memory_bytes=max(peaks, default=None))
