import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from esmeray.tools.__main__ import ALONE, COMMANDS, subcommands
from esmeray.tools.reference import command_schemas
from esmeray.train_config.section import Section, sections_of, settings_of
from tests.conftest import REPOSITORY

PROGRAM = """
import contextlib, io, json, sys
from esmeray.common.command_line import run

results = []
for module, arguments in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as captured, contextlib.redirect_stderr(captured):
        main = __import__(module, fromlist=["main"]).main
        try:
            code = run(main, arguments)
        except SystemExit as ended:
            code = ended.code
    heavy = {"torch", "transformers", "ray", "deepspeed", "peft", "sklearn"} & set(sys.modules)
    results.append([code, sorted(heavy), captured.getvalue()])
print(json.dumps(results))
"""


MISTAKES = [
    ("masked_lm", "--data.source none.fasta", "none.fasta"),
    ("protein_classifier", "--model.backbone.source none", "none"),
    ("protein_classifier", "--model.classifier.best_metric none", "'none'"),
    ("protein_classifier", "--model.classifier.label_weights none.tsv", "label_weights"),
]

# Refused when the weights are counted: the modules that build a model are loaded by then.
MODELS = [("masked_lm", "--model.backbone.heads 7", "can't be split into 7 heads")]

TOOLS = [
    ("tune tokens --config esm2ae --data.source none.fasta --run.storage_path refused", 3, "none.fasta"),
    ("classify predict model --predict.input a.csv --predict.output there.csv", 2, "there.csv: already exists"),
    ("classify predict model --predict.input a.csv --predict.output b.csv", 3, "model"),
    ("classify evaluate model --evaluate.input a.csv", 3, "model"),
    ("train export absent", 2, "absent"),
]


NAMES = [*ALONE, *(f"{command} {name}" for command in COMMANDS for name in subcommands(command))]


def experiments(folder: Path) -> dict[str, list[str]]:
    """Arguments of two shipped experiments; the classifier gets small data."""
    proteins = [f">p{i} {'in' if i % 2 else 'out'}\nMKT{'LAGV' * (i + 1)}\n" for i in range(20)]
    (folder / "proteins.fasta").write_text("".join(proteins))
    own = ["--data.source", "proteins.fasta", "--data.labels.header_field", "1", "--data.labels.split", "hash"]
    shipped = {"masked_lm": ["--data.sample.records", "100"], "protein_classifier": own}
    folder = REPOSITORY / "train_config"
    return {
        name: ["--config", str(folder / f"{name}.yaml"), *options, "--ray.address", "local"]
        for name, options in shipped.items()
    }


@pytest.fixture(scope="module")
def replies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[int, list[str], str]]]:
    """Exit code, heavy imports so far, and output of each call in a new process; cheap calls come first."""
    folder = tmp_path_factory.mktemp("imports")
    (folder / "model").mkdir()
    (folder / "model" / "esmeray_model.json").write_text('{"task": "classifier"}')
    (folder / "model" / "classifier_config.json").write_text("{}")
    (folder / "a.csv").write_text("name,text\nx,MK\n")
    (folder / "there.csv").touch()
    shipped = experiments(folder)
    # A late refusal has already written the store.
    refused = {name: [*options, "--run.storage_path", "refused"] for name, options in shipped.items()}
    calls = {
        "help": [("train_ray", [*options, "--help"]) for options in shipped.values()],
        "help of tools": [("esmeray.tools.__main__", [*name.split(), "--help"]) for name in NAMES],
        "mistakes": [("train_ray", [*refused[experiment], *words.split()]) for experiment, words, _ in MISTAKES],
        "tools": [("esmeray.tools.__main__", line.split()) for line, _, _ in TOOLS],
        "plans": [("train_ray", [*options, "--dry_run"]) for options in shipped.values()],
        "models": [("train_ray", [*refused[experiment], *words.split()]) for experiment, words, _ in MODELS],
    }
    environment = {"PYTHONPATH": str(REPOSITORY), "TMPDIR": str(folder), "COLUMNS": "200"}
    program = [sys.executable, "-c", PROGRAM, json.dumps([call for part in calls.values() for call in part])]
    output = subprocess.check_output(program, text=True, cwd=folder, env=environment)
    assert not (folder / "runs").exists()
    results = iter(json.loads(output))
    return {kind: [next(results) for _ in part] for kind, part in calls.items()}


@pytest.mark.slow
def test_help_of_every_experiment_imports_nothing_heavy(replies):
    assert [(code, heavy) for code, heavy, _ in replies["help"]] == [(0, [])] * 2
    for code, heavy, text in replies["plans"]:
        assert code == 0 and {*heavy} <= {"torch", "transformers"} and "global_tokens: " in text, text
        for line in ("workers", "training data", "tokens per step", "steps per epoch", "parameters", "device memory"):
            assert f"\n{line}  " in text


def test_help_of_every_tool_has_its_settings_and_imports_nothing_heavy(replies):
    schemas = command_schemas()
    assert schemas.keys() <= {*NAMES}
    for name, (code, heavy, text) in zip(NAMES, replies["help of tools"], strict=True):
        assert (code, heavy) == (0, []), text
        assert f"tools {name}" in text
        options = re.findall(r"^  (--[\w.-]+)", text, re.MULTILINE)
        schema = schemas.get(name, Section)
        assert {*options} >= {f"--{'.'.join(key)}" for key in settings_of(schema) if len(key) > 1}
        assert [option for option in options if "-" in option.removeprefix("--")] == []
        assert all(section.__doc__ for path, section in sections_of(schema).items() if path)


def test_refusals_of_configs_data_and_files_import_nothing_heavy(replies):
    expected = [({2, 3}, words) for _, _, words in MISTAKES] + [({code}, words) for _, code, words in TOOLS]
    expected += [({2, 3}, words) for _, _, words in MODELS]
    refusals = [*replies["mistakes"], *replies["tools"], *replies["models"]]
    for (codes, words), (code, _, text) in zip(expected, refusals, strict=True):
        assert code in codes and words in text and text.count("\n") == 1, text
    assert all(heavy == [] for kind in ("mistakes", "tools") for _, heavy, _ in replies[kind])
