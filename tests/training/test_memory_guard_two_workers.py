"""Memory that runs out on one of two workers: neither waits for the other for ever, and no loss changes."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from tests.runs import events, run_folder, tiny_config, train_losses
from train_config.schema import Config
from training.context import StandaloneContext
from training.engine import TrainingEngine
from training.worker import train_worker

FITS_TOKENS = 150


def run_rank(rank: int, rendezvous: str, config: dict, store_path: str, fault: str | None) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    if rank == 1 and fault is not None:
        {"forward": forward_needs_memory, "backward": backward_needs_memory}[fault]()
    train_worker(Config.model_validate(config), StandaloneContext(rank, 2, rank), store_path)
    dist.barrier()


def forward_needs_memory() -> None:
    """From the third training batch on, large ones do not fit on this worker."""
    honest, calls = TrainingEngine.__call__, []

    def call(self, batch):
        output = honest(self, batch)
        if torch.is_grad_enabled():
            calls.append(1)
            if len(calls) > 2 and batch.num_tokens > FITS_TOKENS:
                raise torch.OutOfMemoryError("injected")
        return output

    TrainingEngine.__call__ = call


def backward_needs_memory() -> None:
    """The backward pass of the third step's second batch breaks off in the middle."""
    honest, calls = TrainingEngine.backward, []

    def fail(gradient):
        raise torch.OutOfMemoryError("injected")

    def backward(self, loss_sum, global_targets):
        calls.append(1)
        if len(calls) == 6:
            trained = [p for p in self.module.parameters() if p.requires_grad]
            trained[len(trained) // 2].register_hook(fail)
        honest(self, loss_sum, global_targets)

    TrainingEngine.backward = backward


def train(config: Config, store_path: str, fault: str | None = None) -> None:
    folder = run_folder(config).path
    folder.mkdir(parents=True, exist_ok=True)
    rendezvous = folder.parent / f"rendezvous-{len(list(folder.parent.glob('rendezvous-*')))}"
    multiprocessing.spawn(run_rank, (str(rendezvous), config.model_dump(), store_path, fault), nprocs=2)


def config_for(folder) -> Config:
    """Four micro-batches a step, two on each worker; a checkpoint after the second step."""
    return tiny_config(
        folder,
        model={"task": "masked_lm"},
        batch={"global_tokens": 1024},
        training={"max_steps": 4, "evaluate_every_steps": 100},
        checkpoint={"every_steps": 2},
    )


@pytest.fixture(scope="module")
def undisturbed(store_path, tmp_path_factory) -> dict[int, float]:
    """Losses of a run with memory enough."""
    config = config_for(tmp_path_factory.mktemp("undisturbed"))
    train(config, store_path)
    return train_losses(config)


@pytest.mark.slow
def test_running_out_in_a_forward_pass_of_one_worker_halves_on_both(undisturbed, store_path, tmp_path):
    config = config_for(tmp_path)
    train(config, store_path, fault="forward")
    assert train_losses(config) == pytest.approx(undisturbed, rel=1e-5)
    assert [event["parts"] for event in events(config, "memory_guard")] == [2]


@pytest.mark.slow
def test_running_out_in_a_backward_pass_of_one_worker_starts_again_with_parts(undisturbed, store_path, tmp_path):
    config = config_for(tmp_path)
    with pytest.raises(Exception, match=r"NewStartError|Connection closed|gloo"):
        train(config, store_path, fault="backward")
    assert run_folder(config).read_outcome() is None  # so the launcher's next attempt goes on
    train(config, store_path)
    assert events(config, "resumed")[0]["step"] == 2
    assert train_losses(config) == pytest.approx(undisturbed, rel=1e-5)
    assert [(e["step"], e["parts"]) for e in events(config, "memory_guard")] == [(2, 2)]
