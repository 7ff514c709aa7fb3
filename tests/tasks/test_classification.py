import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
from sklearn import metrics
from transformers import BertConfig, BertModel

from esmeray.cluster.collective import WorkerContext
from esmeray.common.errors import CheckpointError, ConfigError, DataError
from esmeray.dataset.labels.store import LabelledStore
from esmeray.inference.classifier import ClassifierPipeline
from esmeray.run_folder.checkpoints import CheckpointStore
from esmeray.run_folder.metrics_log import read_metrics
from esmeray.run_folder.paths import Outcome, RunFolder
from esmeray.tasks.classifier import experiment
from esmeray.tasks.classifier.experiment import ClassifierExperiment
from esmeray.tasks.classifier.plan import ClassifierPlan
from esmeray.tools.train.export import main as export_command
from esmeray.train_config.natures import with_absolute_paths
from esmeray.training.config import Config
from esmeray.training.launch.planning import check_task
from tests.dataset.tokenizer_folders import prot_bert
from tests.runs import events, merged, run_folder, tiny_config, train_losses, validations
from tests.training.runs import prepared, stop_after, train_with
from tests.training.runs import train as train_on

pytestmark = pytest.mark.slow

CLASSIFIER = {
    "data": {"max_length": 62, "labels": {"text_column": "text", "split": "stratified"}, "validation_share": 0.3},
    "batch": {"tokens": 256, "global_tokens": 512},
    "model": {"task": "classifier", "classifier": {"dropout": 0.0}},
    "training": {"max_steps": 28, "evaluate_every_steps": 7, "learning_rate": 2e-2},
    "checkpoint": {"every_steps": 14},
}
RICH_IN = {"acid": "DE", "base": "KR", "greasy": "LVIF"}


def write_table(path: Path, header: str, rows: list[str]) -> Path:
    path.write_text("\n".join([header, *rows]) + "\n")
    return path


def drawn_sequences(count: int, seed: int, letters: str = "ACDEFGHIKL", length: int = 20) -> list[str]:
    draw = random.Random(seed)
    return ["".join(draw.choices(letters, k=length)) for _ in range(count)]


def plan_of(config: Config) -> ClassifierPlan:
    return ClassifierPlan(config.data, config.model)


@pytest.fixture(scope="module")
def table(tmp_path_factory) -> Path:
    draw = random.Random(0)
    rows = []
    for number in range(150):
        label = sorted(RICH_IN)[number % 3]
        letters = "ACDEFGHIKLMNPQRSTVWY" + 12 * RICH_IN[label]
        rows.append(f"{''.join(draw.choices(letters, k=draw.randint(5, 80)))},{label}")
    return write_table(tmp_path_factory.mktemp("labelled") / "proteins.csv", "text,label", rows)


def config_of(folder: Path, table: Path, **changes: dict) -> Config:
    return tiny_config(folder, **merged(merged(CLASSIFIER, {"data": {"source": [str(table)]}}), changes))


def train(config: Config) -> tuple[Outcome, Path]:
    path = prepared(config)
    return train_on(config, path), path


@pytest.fixture(scope="module")
def trained(process_group, table, tmp_path_factory) -> tuple[Config, LabelledStore]:
    config = config_of(tmp_path_factory.mktemp("trained"), table)
    outcome, path = train(config)
    assert outcome.status == "finished"
    return config, LabelledStore(path)


def test_a_classifier_learns_and_exports_its_best_checkpoint(trained):
    config, _ = trained
    first, *_, last = validations(config)
    assert last["accuracy"] > 0.9 > first["accuracy"] + 0.2 and last["loss"] < first["loss"]
    (event,) = events(config, "exports_best")
    costs = {record["step"]: -record["mcc"] for record in validations(config) if record["step"]}
    assert costs[event["step"]] == min(costs.values())
    for file in (folder / "label_mappings.json" for folder in (run_folder(config).export, run_folder(config).path)):
        assert json.loads(file.read_text())["id2label"] == {"0": "acid", "1": "base", "2": "greasy"}


def held_out(labelled: LabelledStore, pipeline: ClassifierPipeline) -> tuple[np.ndarray, np.ndarray]:
    texts = [labelled.store.text(index) for index in labelled.validation.tolist()]
    return labelled.targets[labelled.validation], pipeline.predict(texts).probabilities


def test_an_export_takes_names_and_config_from_its_checkpoint(trained, tmp_path):
    run = RunFolder(tmp_path, "tiny")
    shutil.copytree(run_folder(trained[0]).path, run.path)
    text = (run.path / "label_mappings.json").read_text()
    (run.path / "label_mappings.json").write_text(text.replace("acid", "salt").replace("greasy", "sugar"))
    run.config.write_text(run.config.read_text().replace("max_length: 62", "max_length: 10"))
    shutil.rmtree(run.tokenizer)
    assert export_command([str(run.path), "--export.output", str(tmp_path / "model")]) == 0
    exported = ClassifierPipeline.load(tmp_path / "model")
    assert exported.label_space.names == ("acid", "base", "greasy")
    assert exported.max_length == 62


def test_another_tokenizer_than_the_checkpoint_s_is_refused(trained, table, tmp_path):
    config, labelled = trained
    checkpoint = CheckpointStore(run_folder(config).checkpoints).complete()[0]
    plan_of(config).check_resumed(checkpoint, labelled.path)
    other = config_of(tmp_path, table, model={"backbone": {"source": str(prot_bert(tmp_path / "prot_bert"))}})
    with pytest.raises(CheckpointError, match="was trained with a different tokenizer"):
        plan_of(other).check_resumed(checkpoint, labelled.path)


def test_training_ends_when_it_no_longer_gets_better(table, tmp_path, process_group):
    changes = {
        "model": {"classifier": {"patience": 2}},
        "training": {"max_steps": 100, "evaluate_every_steps": 2, "learning_rate": 1e-12},
        "checkpoint": {"every_steps": 100},
    }
    config = config_of(tmp_path, table, **changes)
    outcome, _ = train(config)
    assert (outcome.status, outcome.step) == ("finished", 6)
    assert "stopped early after 2 evaluations without improvement" in outcome.message


def test_a_stopped_run_resumes_to_the_same_end_with_loader_processes(trained, table, tmp_path, loader_processes):
    config = config_of(tmp_path, table, data={"stage_dir": str(tmp_path / "local"), "num_workers": 1})
    stop_after(config, str(prepared(config)), 14)
    outcome, _ = train(config)
    assert outcome.status == "finished" and len(loader_processes) == 2, "one of each start"
    assert [path.name.partition("-")[0] for path in (tmp_path / "local").iterdir()] == ["sequences"]
    assert train_losses(config) == train_losses(trained[0])


@pytest.mark.parametrize(
    "model",
    [
        {"backbone": {"lora": {"rank": 2}}, "classifier": {"head": "mlp", "pooling": "max"}},
        {
            "backbone": {"layer_decay": 0.5},
            "classifier": {"pooling": "cls", "class_weights": "balanced"},
        },
    ],
    ids=["lora", "layer decay"],
)
def test_every_way_of_fine_tuning_trains_and_its_export_predicts_as_it_did(table, tmp_path, process_group, model):
    config = config_of(tmp_path, table, model=model, training={"max_steps": 4, "evaluate_every_steps": 2})
    outcome, path = train(config)
    assert outcome.status == "finished"
    targets, predicted = held_out(LabelledStore(path), ClassifierPipeline.load(run_folder(config).export))
    (event,) = events(config, "exports_best")
    best = next(record for record in validations(config) if record["step"] == event["step"])
    assert best["accuracy"] == pytest.approx(metrics.accuracy_score(targets, predicted.argmax(1)), abs=1e-6)


def test_a_text_classifier_trains_its_own_tokenizer(tmp_path, process_group):
    kinds = {"hello": "in", "hi there": "in", "good morning": "in", "bye": "out", "see you": "out", "good night": "out"}
    rows = [f"{text} {number}\t{kind}" for number in range(20) for text, kind in kinds.items()]
    path = write_table(tmp_path / "messages.tsv", "text\tlabel", rows)
    model = {
        "backbone": {"source": "qwen2", "layers": 1, "hidden_size": 16, "heads": 2},
        "tokenizer": {"content": "text", "vocabulary_size": 300},
        "classifier": {"pooling": "last"},
    }
    config = config_of(tmp_path, path, model=model)
    outcome, labelled = train(config)
    assert outcome.status == "finished"
    assert validations(config)[-1]["accuracy"] > 0.9
    targets, predicted = held_out(LabelledStore(labelled), ClassifierPipeline.load(run_folder(config).export))
    assert (predicted.argmax(1) == targets).mean() > 0.9


def test_residues_are_classified_one_by_one(tmp_path, process_group):
    sequences = drawn_sequences(60, seed=1, letters="DEKRLVIF")
    letters = str.maketrans("DEKRLVIF", "AABBGGGG")
    path = write_table(tmp_path / "residues.csv", "text,label", [f"{s},{s.translate(letters)}" for s in sequences])
    labels = {"kind": "per_residue", "split": "hash", "text_column": "text"}
    config = config_of(tmp_path, path, data={"labels": labels})
    train(config)
    assert validations(config)[-1]["accuracy"] > 0.95


def test_numbers_of_any_unit_are_learnt_alike(tmp_path, process_group):
    sequences = drawn_sequences(120, seed=2, length=30)
    figures = []
    for name, unit, zero in (("shares", 1.0, 0.0), ("degrees", 20.0, 60.0)):
        rows = [f"{s},{zero + unit * (s.count('A') / 3 + s.count('D') / 5):.9f}" for s in sequences]
        path = write_table(tmp_path / f"{name}.csv", "text,label", rows)
        labels = {"kind": "regression", "split": "hash", "text_column": "text"}
        steps = {"max_steps": 60, "evaluate_every_steps": 20}
        config = config_of(
            tmp_path / name, path, data={"labels": labels}, training=steps, checkpoint={"every_steps": 60}
        )
        _, stored = train(config)
        best = min(validations(config)[1:], key=lambda record: -record["spearman"])
        targets, predicted = held_out(LabelledStore(stored), ClassifierPipeline.load(run_folder(config).export))
        assert best["r2"] == pytest.approx(metrics.r2_score(targets, predicted), abs=1e-4)
        figures.append(best)
    assert figures[0]["r2"] > 0.3
    for name in ("r2", "spearman", "loss"):
        assert figures[1][name] == pytest.approx(figures[0][name], rel=1e-3), name


@pytest.mark.parametrize(
    ("classifier", "message"),
    [
        ({"best_metric": "fmax"}, r"multiclass has no metric 'fmax'; available: .*accuracy"),
        ({"label_weights": "weights.tsv"}, r"label_weights needs data\.labels\.kind multilabel, not multiclass"),
    ],
)
def test_settings_that_do_not_fit_the_labels_are_refused_early(table, tmp_path, classifier, message):
    config = config_of(tmp_path, table, model={"classifier": classifier})
    with pytest.raises(ConfigError, match=message):
        plan_of(config).prepare(tmp_path)
    assert not list(tmp_path.rglob("*"))


def test_evaluations_in_which_the_metric_is_not_defined_end_no_run(tmp_path, process_group):
    # The held-out records have no label, so that there is nothing to rank.
    targets = ("0,0,valid", "0,1,train", "1,0,train")
    rows = [f"{text},{targets[number % 3]}" for number, text in enumerate(drawn_sequences(60, seed=3))]
    path = write_table(tmp_path / "labels.csv", "text,a,b,part", rows)
    labels = {"kind": "multilabel", "label_columns": ["a", "b"], "split": "column", "split_column": "part"}
    config = config_of(
        tmp_path / "run",
        path,
        data={"labels": {**labels, "text_column": "text"}},
        model={"classifier": {"best_metric": "auroc"}},
        training={"max_steps": 4, "evaluate_every_steps": 2},
    )
    outcome, stored = train(config)
    assert outcome.status == "finished" and run_folder(config).export.is_dir()
    assert len(validations(config)) > 1 and all("auroc" not in record for record in validations(config))
    experiment = ClassifierExperiment(config.task_settings, WorkerContext(), run_folder(config), stored)
    assert experiment.cost({"accuracy": 1.0}) is None and experiment.cost({"auroc": 0.25}) == -0.25


def test_lists_of_names_train_by_weights_of_labels(tmp_path, process_group, monkeypatch):
    lists = ("a", "b;a", "c", "d;c;a", "b;d", "a;c")
    rows = [f"{text},{lists[number % 6]}" for number, text in enumerate(drawn_sequences(60, seed=5))]
    path = write_table(tmp_path / "lists.csv", "text,label", rows)
    (tmp_path / "weights.tsv").write_text("c\t2.5\na\t0.5\n")
    monkeypatch.chdir(tmp_path)
    config = config_of(
        tmp_path / "run",
        path,
        data={"labels": {"kind": "multilabel", "text_column": "text", "split": "hash"}},
        model={"classifier": {"class_weights": "balanced", "label_weights": "weights.tsv"}},
        training={"max_steps": 4, "evaluate_every_steps": 2},
    )
    config = with_absolute_paths(config)
    assert config.model.classifier.label_weights == str(tmp_path / "weights.tsv")
    stored = prepared(config)
    assert train(config)[0].status == "finished"
    labelled = LabelledStore(stored)
    loss = ClassifierExperiment(config.task_settings, WorkerContext(), run_folder(config), stored).build_model().loss
    assert loss.label_weights.tolist() == [0.5, 1, 2.5, 1]
    positives = labelled.targets[labelled.training].sum(0)
    expected = (labelled.training.size - positives) / positives
    assert loss.class_weights.tolist() == pytest.approx(expected.tolist())
    (tmp_path / "weights.tsv").write_text("z\t2.5\n")
    for refused in (lambda: plan_of(config).prepare(tmp_path / "new"), plan_of(config).estimate):
        with pytest.raises(DataError, match="line 1: the label 'z' does not occur in the training records"):
            refused()


@pytest.mark.parametrize("backbone", [{"source": "t5"}, {"padded": True, "source": "bert"}])
def test_zero_3_is_refused_for_a_padded_backbone_before_any_worker_starts(table, tmp_path, backbone):
    config = config_of(tmp_path, table, deepspeed={"stage": 3}, model={"backbone": backbone})
    with pytest.raises(ConfigError, match=r"deepspeed\.stage 3: .* use stage 2"):
        check_task(plan_of(config), config.training, config.deepspeed)


def test_sequences_beyond_the_backbones_positions_are_refused_early(table, tmp_path):
    folder = prot_bert(tmp_path / "short")
    size = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    BertModel(BertConfig(vocab_size=40, max_position_embeddings=40, **size)).save_pretrained(folder)
    backbone = {"source": str(folder), "layers": None, "hidden_size": None, "heads": None}
    with pytest.raises(ConfigError, match=r"supports at most 38 tokens per text.* set it to at most 38"):
        plan_of(config_of(tmp_path, table, model={"backbone": backbone})).estimate()
    shorter = config_of(tmp_path, table, model={"backbone": backbone}, data={"max_length": 38})
    size, _ = plan_of(shorter).estimate()
    assert size.sequences


@pytest.mark.parametrize(("pooling", "precision"), [("mean", "bf16"), ("light_attention", "fp32")])
def test_a_head_from_kept_features_equals_one_from_computed_ones(table, tmp_path, process_group, pooling, precision):
    """The kept features need not start with the first records."""
    header, *rows = table.read_text().splitlines()
    parts = ["test", "test", "train", "valid", "train"] * 30
    rows = [f"{row},{part}" for row, part in zip(rows, parts, strict=True)]
    path = write_table(tmp_path / "parts.csv", f"{header},part", rows)
    runs = {}
    for cached in (True, False):
        changes = {
            "data": {"crop": "ends", "labels": {"split": "column", "split_column": "part"}},
            "model": {"backbone": {"frozen": True, "cache_features": cached}, "classifier": {"pooling": pooling}},
            "training": {"max_steps": 4, "precision": precision},
        }
        runs[cached] = config_of(tmp_path / str(cached), path, **changes)
        outcome, store = train(runs[cached])
        assert outcome.status == "finished"
        assert (store.parent / "features").exists() is cached
    tolerance = 1e-5 if precision == "fp32" else 2e-2
    assert train_losses(runs[True]) == pytest.approx(train_losses(runs[False]), rel=tolerance)
    kept, computed = (validations(runs[cached])[-1] for cached in (True, False))
    assert kept["accuracy"] == pytest.approx(computed["accuracy"], abs=1e-6 if precision == "fp32" else 0.05)


def test_features_are_computed_once_for_all_runs_on_the_same_backbone(table, tmp_path, process_group, monkeypatch):
    changes = {
        "data": {"crop": "start"},
        "model": {"backbone": {"frozen": True}},
        "training": {"max_steps": 2, "warmup_steps": 1, "gpu_log_interval": 0.05},
    }
    with pytest.raises(ConfigError, match=r"set data\.crop to start or ends"):
        train(config_of(tmp_path / "random windows", table, model=changes["model"]))
    first = config_of(tmp_path, table, **changes)
    train(first)
    monkeypatch.setattr(experiment, "write_shard", lambda *_: pytest.fail("features were computed again"))
    changes["training"]["learning_rate"] = 1e-3
    second = config_of(tmp_path, table, **changes, run={"name": "second"})
    assert train(second)[0].status == "finished"
    assert (hit_rate(first), hit_rate(second)) == (0.0, 1.0)


def hit_rate(config: Config) -> float:
    samples = read_metrics(run_folder(config).monitoring / "worker-00000.jsonl")
    return samples[-1]["metrics"]["data/worker/0/feature_cache_hit_rate"]


def test_two_workers_with_shares_of_unequal_size_give_the_metrics_of_one(table, tmp_path, process_group, worker_group):
    changes = {"training": {"max_steps": 6, "evaluate_every_steps": 3}}
    figures = {}
    for workers in (1, 2):
        config = config_of(tmp_path / str(workers), table, **changes)
        path = prepared(config)
        train_with(workers, config, str(path), worker_group)
        figures[workers] = validations(config)
    for one, two in zip(figures[1], figures[2], strict=True):
        names = [name for name, value in one.items() if isinstance(value, float) and name != "time"]
        assert {n: two[n] for n in names} == pytest.approx({n: one[n] for n in names}, abs=1e-5)
    assert LabelledStore(path).validation.size % 2  # an odd number: one worker has a record more
