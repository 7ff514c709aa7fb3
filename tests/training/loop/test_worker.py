import hashlib
import json
import pickle
import shutil
import time
from itertools import count
from pathlib import Path

import pytest
import torch
from ray.exceptions import RayActorError
from safetensors.torch import load_file
from transformers import EsmForMaskedLM

from esmeray.cluster.collective import WorkerContext
from esmeray.common.errors import CheckpointError, DataError
from esmeray.dataset.batches.loader_process import LoaderProcessLost
from esmeray.dataset.store.reader import Store
from esmeray.dataset.tokens.esm import pack_sequences
from esmeray.run_folder.checkpoints import CheckpointFolder, CheckpointStore, FileEntry
from esmeray.run_folder.metrics_log import read_metrics
from esmeray.tasks.plan import task_plan
from esmeray.training.engine.engine import TrainingEngine
from esmeray.training.loop import checkpoints, worker
from esmeray.training.loop.finishing import repeatable
from esmeray.training.loop.observing import StepResults
from esmeray.training.loop.stepping import Stepper
from esmeray.training.loop.worker import train_worker
from tests.model.small_models import save_masked_lm
from tests.model.support import build_model
from tests.runs import events, exported_weights, run_folder, tiny_config, train_losses, validations
from tests.training.runs import assert_same_run, assert_same_weights, damage, nan_in_steps, stop_after, train

pytestmark = pytest.mark.usefixtures("process_group")


@pytest.fixture(scope="module")
def stopped(process_group, store_path, tmp_path_factory):
    """The undisturbed run, stopped with checkpoints at steps 2, 4 and 6 of 8."""
    checkpoint = {"every_steps": 2, "keep_last": 3}
    config = tiny_config(tmp_path_factory.mktemp("stopped"), checkpoint=checkpoint)
    stop_after(config, store_path, 6)
    return config


@pytest.fixture
def stopped_at_6(stopped, tmp_path):
    shutil.copytree(run_folder(stopped).path, tmp_path / "tiny")
    return stopped.model_copy(update={"run": stopped.run.model_copy(update={"storage_path": str(tmp_path)})})


def test_resumed_run_equals_an_uninterrupted_one_despite_leftover_files(stopped_at_6, undisturbed, store_path):
    checkpoints = run_folder(stopped_at_6).checkpoints
    shutil.copytree(checkpoints / "step-00000004", checkpoints / "step-00000099.bak")
    shutil.copytree(checkpoints / "step-00000006", checkpoints / "step-00000008.partial")
    (checkpoints / "latest").unlink()
    logs = run_folder(stopped_at_6).logs
    logs.mkdir(exist_ok=True)
    (logs / "stacks-0.txt").write_text("of a worker that a watchdog ended")
    assert train(stopped_at_6, store_path).status == "finished"
    assert (checkpoints / "latest").read_text() == "step-00000008\n"
    assert not (checkpoints / "step-00000008.partial").exists()
    assert events(stopped_at_6, "resumed")[0]["step"] == 6
    assert events(stopped_at_6, "hung")[0]["message"].endswith(f"stack traces of the workers: {logs / 'hung-1'}")
    assert_same_run(stopped_at_6, undisturbed)


def test_jumping_clock_changes_neither_results_nor_record_order(undisturbed, store_path, tmp_path, monkeypatch):
    real, days = time.time, count()
    monkeypatch.setattr(time, "time", lambda: real() + (-1) ** next(days) * 86_400 * next(days))
    config = tiny_config(tmp_path, checkpoint={"every_steps": 2})
    stop_after(config, store_path, 6)
    train(config, store_path)
    assert events(config, "resumed")[0]["step"] == 6
    assert_same_run(config, undisturbed)
    times = [record["time"] for record in read_metrics(run_folder(config).metrics)]
    assert times == sorted(times)
    assert times[-1] - times[0] < 3600


@pytest.mark.slow
def test_resuming_in_a_later_epoch_equals_never_stopping(store_path, tmp_path):
    batch = {"tokens": 1024, "global_tokens": 2048}
    changes = {"training": {"max_steps": None, "epochs": 2}, "checkpoint": {"every_steps": 2}, "batch": batch}
    whole, resumed = tiny_config(tmp_path / "whole", **changes), tiny_config(tmp_path / "resumed", **changes)
    train(whole, store_path)
    steps = len(train_losses(whole))
    stop_after(resumed, store_path, (steps - 1) // 2 * 2)
    train(resumed, store_path)
    last = CheckpointStore(run_folder(resumed).checkpoints).complete()[0].manifest().position
    assert (last.step, last.epoch, last.step_in_epoch) == (steps, 2, 0)
    assert_same_run(resumed, whole)


def test_damaged_newest_checkpoint_is_left_for_the_one_before(stopped_at_6, undisturbed, store_path):
    damage(run_folder(stopped_at_6).checkpoints / "step-00000006")
    train(stopped_at_6, store_path)
    assert events(stopped_at_6, "resumed")[0]["step"] == 4
    assert "step-00000006 can't be used" in events(stopped_at_6, "warning")[0]["message"]
    assert_same_run(stopped_at_6, undisturbed)


def test_run_whose_checkpoints_are_damaged_or_gone_never_starts_from_zero(stopped_at_6, store_path):
    run, before = run_folder(stopped_at_6), train_losses(stopped_at_6)
    for folder in run.checkpoints.glob("step-*"):
        damage(folder)
    with pytest.raises(CheckpointError, match="no usable checkpoint"):
        train(stopped_at_6, store_path)
    shutil.rmtree(run.checkpoints)
    with pytest.raises(CheckpointError, match="saved one at step 6"):
        train(stopped_at_6, store_path)
    assert run.read_outcome().exit_code == CheckpointError.exit_code
    assert train_losses(stopped_at_6) == before


def test_stop_during_an_evaluation_is_heard(store_path, tmp_path):
    config = tiny_config(tmp_path)
    run = run_folder(config)
    run.path.mkdir(parents=True)
    run.stop_request.touch()
    outcome = train_worker(config, WorkerContext(), store_path)
    assert (outcome.status, outcome.step) == ("stopped", 0)
    assert validations(config) == []


def test_planted_pickle_never_runs(stopped_at_6, store_path, tmp_path):
    marker = tmp_path / "ran"

    class Payload:
        def __reduce__(self):
            return (marker.touch, ())

    folder = run_folder(stopped_at_6).checkpoints / "step-00000006"
    path = next(folder.rglob("*optim_states.pt"))
    for plant in (torch.save, lambda payload, path: path.write_bytes(pickle.dumps(payload))):
        plant({"optimizer_state_dict": Payload()}, path)
        vouch_for(folder, path)
        with pytest.raises(CheckpointError, match="and no code was run"):
            train(stopped_at_6, store_path)
    assert not marker.exists()


def vouch_for(folder, path) -> None:
    manifest = CheckpointFolder(folder).manifest()
    content = path.read_bytes()
    name = str(path.relative_to(folder))
    entry = FileEntry(name=name, size_bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
    files = {rank: [e for e in entries if e.name != name] for rank, entries in manifest.files.items()}
    files[0].append(entry)
    (folder / "manifest.json").write_text(manifest.model_copy(update={"files": files}).sealed().model_dump_json())


def log_late(monkeypatch) -> None:
    """Log the results of steps a step later, as on a GPU."""
    monkeypatch.setattr(worker, "StepResults", lambda *arguments, late: StepResults(*arguments, late=True))


def test_nan_step_is_skipped_and_counted_with_late_results(undisturbed, store_path, tmp_path, monkeypatch):
    log_late(monkeypatch)
    config = tiny_config(tmp_path)
    with nan_in_steps({3}):
        assert train(config, store_path).status == "finished"
    names = ("step", "epoch", "loss", "gradient_norm", "tokens_seen", "learning_rate")
    at_once, late = (
        [[r[name] for name in names] for r in read_metrics(run_folder(run).metrics) if r["kind"] == "train"]
        for run in (undisturbed, config)
    )
    assert at_once[:3] == late[:3] and len(at_once) == len(late)
    assert [event["step"] for event in events(config, "nonfinite")] == [4]
    assert all(bool(tensor.isfinite().all()) for tensor in exported_weights(config).values())
    last = CheckpointStore(run_folder(config).checkpoints).complete()[0].manifest()
    assert (last.position.skipped_steps, last.position.nonfinite_in_a_row) == (1, 0)


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "late", "spoiled", "at"), [(0, False, {6, 7}, 8), (2, True, {4, 5}, 7)])
def test_rewound_run_equals_a_run_without_the_discarded_steps(
    store_path, tmp_path, monkeypatch, stage, late, spoiled, at
):
    """Finite steps after the checkpoint are discarded, too: steps 5 and 6, or 7."""
    changes = {"deepspeed": {"stage": stage}, "checkpoint": {"every_steps": 4}}
    training = {"max_steps": 12, "on_divergence": "rewind"}
    rewound = tiny_config(tmp_path / "rewound", training=training, **changes)
    left_out = tiny_config(tmp_path / "left out", training={"max_steps": 12}, **changes)
    with monkeypatch.context() as patch, nan_in_steps(spoiled):
        patch.setattr(worker, "MAX_NONFINITE_STEPS", 2)
        if late:
            log_late(patch)
        assert train(rewound, store_path).status == "finished"
    with nan_in_steps(range(4, at)):
        train(left_out, store_path)
    (event,) = events(rewound, "rewound")
    assert event["step"] == at
    assert "reset to step 4" in event["message"]
    assert_same_weights(rewound, left_out)
    assert len([*run_folder(rewound).nonfinite.iterdir()]) == 2


@pytest.mark.parametrize(
    ("on_divergence", "most", "nan_in", "step", "rewound_at"),
    [("stop", 3, {2, 3, 4, 5, 6}, 5, []), ("rewind", 2, {4, 5, 6, 7}, 8, [6])],
)
def test_nan_steps_in_a_row_end_the_run_and_name_the_records(
    store_path, tmp_path, monkeypatch, on_divergence, most, nan_in, step, rewound_at
):
    monkeypatch.setattr(worker, "MAX_NONFINITE_STEPS", most)
    monkeypatch.setattr(checkpoints, "MAX_REWINDS", 1)
    config = tiny_config(tmp_path, training={"on_divergence": on_divergence, "gpu_log_interval": 0})
    with nan_in_steps(nan_in):
        outcome = train(config, store_path)
    assert (outcome.status, outcome.exit_code, outcome.step) == ("diverged", 5, step)
    assert [event["step"] for event in events(config, "rewound")] == rewound_at
    files = sorted(run_folder(config).nonfinite.iterdir())
    assert len(files) == len([number for number in nan_in if number < step])
    saved = json.loads(files[0].read_text())
    store = Store(store_path)
    assert saved["records"]
    assert all(store.id(record["index"]) == record["id"] for record in saved["records"])
    assert not run_folder(config).export.exists()
    assert not run_folder(config).monitoring.exists(), "nothing is sampled where the interval is 0"


@pytest.mark.cuda
def test_no_step_of_training_waits_for_the_device(store_path, tmp_path, monkeypatch):
    """Run it alone (-m cuda): DeepSpeed stays on the device of the first test of a process."""

    def guarded(method):
        def call(*arguments):
            torch.cuda.set_sync_debug_mode("error" if run_folder(config).metrics.exists() else "default")
            try:
                return method(*arguments)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        return call

    config = tiny_config(tmp_path, training={"precision": "bf16"})
    monkeypatch.setattr(Stepper, "forward_backward", guarded(Stepper.forward_backward))
    monkeypatch.setattr(TrainingEngine, "step", guarded(TrainingEngine.step))
    context = WorkerContext(device=torch.device("cuda", 0))
    assert train_worker(config, context, store_path).status == "finished"


@pytest.mark.parametrize(
    ("error", "exit_code"),
    [
        (TypeError("a bug"), 1),
        (torch.OutOfMemoryError("CUDA out of memory"), 4),
        (DataError("a damaged record"), 3),
        (RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer"), None),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), 1),
        (FileNotFoundError("no such file"), 1),
        (MemoryError(), 4),
        (RayActorError(), None),
        (OSError("stale file handle"), None),
        (LoaderProcessLost("a loader process was killed"), None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_only_faults_of_machines_are_tried_again(error, exit_code):
    assert repeatable(error) == exit_code


@pytest.fixture(scope="module")
def masked_lm(process_group, store_path, tmp_path_factory):
    training = {"max_steps": 4, "gpu_log_interval": 60.0}
    config = tiny_config(tmp_path_factory.mktemp("masked"), model={"task": "masked_lm"}, training=training)
    train(config, store_path)
    return config


def test_masked_lm_run_is_exported_timed_and_sampled(masked_lm):
    run = run_folder(masked_lm)
    batch = pack_sequences(["MKTAYIAKQR"])
    assert EsmForMaskedLM.from_pretrained(run.export)(batch.tokens[None]).logits.shape == (1, 12, 33)
    for record in (r for r in read_metrics(run.metrics) if r["kind"] == "train"):
        parts = ["data_wait", "forward", "backward", "optimizer", "communication"]
        assert 0 < sum(record[f"{part}_s"] for part in parts) <= record["step_s"]
        assert min(record["forward_s"], record["backward_s"], record["optimizer_s"]) > 0
        assert 0 <= record["padding_share"] < 1
    *_, last = (json.loads(line) for line in (run.monitoring / "worker-00000.jsonl").read_text().splitlines())
    assert (last["kind"], last["step"]) == ("sample", 4)
    assert last["metrics"]["throughput/worker/0/step_s"] == record["step_s"]
    assert record["checkpoint_s"] == 0  # no record has the checkpoint after the last step


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_lora_resumes_to_the_same_end_and_changes_nothing_but_what_it_adapts(store_path, tmp_path, optimizer):
    base = save_masked_lm(tmp_path / "base", "esm").state_dict()
    sizes = dict.fromkeys(("layers", "hidden_size", "heads"))  # a folder has its own
    backbone = {"source": str(tmp_path / "base"), "lora": {"rank": 2, "alpha": 64}, **sizes}
    changes = {"model": {"task": "masked_lm", "backbone": backbone}, "training": {"optimizer": optimizer}}
    whole, stopped = (tiny_config(tmp_path / name, **changes) for name in ("whole", "stopped"))
    train(whole, store_path)
    stop_after(stopped, store_path, 4)
    train(stopped, store_path)
    assert_same_run(stopped, whole)
    exported = load_file(run_folder(whole).export / "model.safetensors")
    changed = {name for name in exported.keys() & base.keys() if not torch.equal(exported[name], base[name])}
    names = [*(f"self.{name}" for name in ("query", "key", "value")), "output.dense"]
    assert changed == {f"esm.encoder.layer.{layer}.attention.{name}.weight" for layer in range(2) for name in names}
    # Weights and both moments of the adapters only, in fp32.
    files = run_folder(whole).checkpoints.rglob("*.pt")
    assert max(file.stat().st_size for file in files) < sum(weight.nbytes for weight in base.values())


def test_trained_weights_of_a_run_are_the_start_of_the_next(masked_lm, store_path, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = f"file://{run_folder(masked_lm).path}"
    backbone = {"source": source, "layers": None, "hidden_size": None, "heads": None}
    trained = load_file(run_folder(masked_lm).export / "model.safetensors")
    for task, prefix in (("masked_lm", ""), ("autoencoder", "esm.")):
        config = tiny_config(tmp_path, model={"task": task, "backbone": backbone})
        measured = task_plan(config.data, config.model).measure(Path(store_path))  # as in the driver
        assert measured.parameters.total > 0
        network = build_model(config.model, seed=1).network()
        started = {f"{prefix}{name}": parameter for name, parameter in network.named_parameters()}
        shared = trained.keys() & started.keys()
        assert len(shared) > 10 and all(torch.equal(trained[name], started[name]) for name in shared)
