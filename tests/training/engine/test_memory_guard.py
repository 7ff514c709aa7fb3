import pytest
import torch

from esmeray.cluster.collective import WorkerContext
from esmeray.common.errors import ResourceError
from esmeray.training.engine.engine import TrainingEngine
from esmeray.training.loop.worker import train_worker
from tests.runs import events, exported_weights, run_folder, tiny_config, train_losses

FITS_TOKENS = 150
"""Of batches of up to 256."""


def out_of_memory() -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError("injected: CUDA out of memory")


def forward_needs_memory(monkeypatch, from_call=3) -> list[int]:
    """From this training batch on, large ones do not fit; returns the sizes that are computed from then on."""
    honest, calls, sizes = TrainingEngine.__call__, [], []

    def call(self, batch):
        output = honest(self, batch)  # as far as memory lasts: what it took is let go
        if torch.is_grad_enabled():
            calls.append(1)
            if len(calls) >= from_call:
                if batch.num_tokens > FITS_TOKENS:
                    raise out_of_memory()
                sizes.append(batch.num_tokens)
        return output

    monkeypatch.setattr(TrainingEngine, "__call__", call)
    return sizes


def backward_needs_memory(monkeypatch, call: int) -> None:
    """The backward pass of this call (from 0) fails in the middle, when some gradients are there."""
    honest, calls = TrainingEngine.backward, []

    def backward(self, loss_sum, global_targets):
        calls.append(1)
        handle = None
        if len(calls) - 1 == call:
            trained = [p for p in self.module.parameters() if p.requires_grad]
            handle = trained[len(trained) // 2].register_hook(fail)
        try:
            honest(self, loss_sum, global_targets)
        finally:
            if handle is not None:
                handle.remove()

    def fail(gradient):
        raise out_of_memory()

    monkeypatch.setattr(TrainingEngine, "backward", backward)


def train(config, store_path):
    return train_worker(config, WorkerContext(), store_path)


def config_for(folder, **changes):
    changes.setdefault("model", {"task": "masked_lm"})
    return tiny_config(folder, **{"training": {"max_steps": 4, "evaluate_every_steps": 100}, **changes})


def assert_same_result(config, expected) -> None:
    assert train_losses(config) == pytest.approx(train_losses(expected), rel=1e-5)
    weights = exported_weights(expected)
    for name, value in exported_weights(config).items():
        torch.testing.assert_close(value, weights[name], rtol=1e-5, atol=1e-5)


def assert_same_bits(config, expected) -> None:
    assert train_losses(config) == train_losses(expected)
    weights = exported_weights(expected)
    assert all(torch.equal(value, weights[name]) for name, value in exported_weights(config).items())


@pytest.mark.usefixtures("process_group")
class TestRun:
    @pytest.mark.parametrize("task", ["masked_lm", "autoencoder"])
    def test_running_out_in_a_forward_pass_changes_no_loss_and_a_resumed_run_keeps_the_parts(
        self, task, store_path, tmp_path, monkeypatch
    ):
        whole, guarded = (config_for(tmp_path / name, model={"task": task}) for name in ("whole", "guarded"))
        train(whole, store_path)
        with monkeypatch.context() as patch:
            sizes = forward_needs_memory(patch)
            assert train(guarded, store_path).status == "finished"
        assert max(sizes) <= FITS_TOKENS
        assert_same_result(guarded, whole)
        assert [event["parts"] for event in events(guarded, "memory_guard")] == [2]
        run_folder(guarded).clear_requests()
        longer = guarded.model_copy(update={"training": guarded.training.model_copy(update={"max_steps": 5})})
        sizes = forward_needs_memory(monkeypatch, from_call=1)
        train(longer, store_path)
        assert max(sizes) <= FITS_TOKENS
        assert "out of memory before" in events(longer, "memory_guard")[-1]["message"]

    @pytest.mark.parametrize(
        ("stage", "precision", "offload"),
        [(0, "fp32", False), (0, "bf16", False), (1, "bf16", False), (2, "fp32", True)],
    )
    def test_broken_backward_pass_leaves_nothing_behind(
        self, stage, precision, offload, store_path, tmp_path, monkeypatch
    ):
        """To the last bit what a run gives that takes every batch in two parts from the start."""
        changes = {
            "deepspeed": {"stage": stage, "offload_optimizer": offload},
            "training": {"max_steps": 3, "evaluate_every_steps": 100, "precision": precision},
        }
        in_parts, guarded = (config_for(tmp_path / name, **changes) for name in ("parts", "guarded"))
        run_folder(in_parts).path.mkdir(parents=True)
        run_folder(in_parts).memory_guard.write_text('{"parts": 2}')
        train(in_parts, store_path)
        backward_needs_memory(monkeypatch, call=1)  # the second of the first step
        assert train(guarded, store_path).status == "finished"
        assert_same_bits(guarded, in_parts)

    def test_limit_on_the_cpu_is_out_of_memory(self, store_path, tmp_path):
        config = config_for(tmp_path, training={"max_steps": 2, "warmup_steps": 1, "cpu_memory_limit_mib": 1.0})
        with pytest.raises(ResourceError, match="out of memory"):
            train(config, store_path)
        outcome = run_folder(config).read_outcome()
        assert (outcome.status, outcome.exit_code) == ("failed", 4)
        assert "gradient_checkpointing" in outcome.message
