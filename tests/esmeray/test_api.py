"""The names of ``import esmeray``: each has a working example, and importing them loads no heavy modules."""

import ast
import doctest
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import reduce
from inspect import signature
from operator import or_
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import numpy as np
import pandas as pd
import pytest

import esmeray
from esmeray.common.command_line import run
from esmeray.dataset.section import IngestSection, SampleSection
from esmeray.dataset.store.conversion import convert
from esmeray.function.sample import write_sample
from esmeray.function.section import PredictTermsSection
from esmeray.inference.alignment import AlignSection
from esmeray.inference.classify.calls import ClassifyEvaluateSection, ClassifySection
from esmeray.inference.design.calls import GenerateSection
from esmeray.inference.embedding.section import LayersSection
from esmeray.inference.function.prediction import finish
from esmeray.inference.index.build import IndexSection
from esmeray.inference.index.search import SearchSection
from esmeray.inference.mutations.section import MutationFitSection, MutationProposeSection, MutationScanSection
from esmeray.model.export.backbone import export as save_diffusion
from esmeray.tasks.plan import TaskPlan
from esmeray.tools.__main__ import main
from esmeray.train_config.loading import dump_config
from esmeray.training.config import Config
from tests.conftest import REPOSITORY
from tests.dataset.tokenizer_folders import esm
from tests.embeddings import make_embeddings, random_vectors
from tests.model.small_models import save_masked_lm
from tests.model.support import random_sequences
from tests.runs import TINY
from tests.service.serving import Serving
from tests.structures import folds, pdb_lines, write_pdb
from tests.tasks.test_diffusion_model import trained

pytestmark = pytest.mark.slow

ORDER = (
    "read_ontology",
    "read_annotations",
    "read_scores",
    "evaluate_functions",
    "open_model",
    "Model",
    "fit_mutants",
    "propose",
)
"""Names whose examples use the results of the previous name's examples, in order."""


def save_functions(folder: Path) -> None:
    """Save a run of function prediction without a network."""
    data = {"source": ["sample"], "sample": {"records": 60, "families": 4}, "terms": {"min_count": 3}}
    model = {"task": "terms", "terms": {"parts": ["naive", "homology"]}}
    config = Config.model_validate(
        {"run": {"name": "functions", "storage_path": str(folder)}, "data": data, "model": model}
    )
    finish(config.run, config.data, config.model.terms)
    (folder / "functions" / "config.yaml").write_text(dump_config(config))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, serving: Serving) -> Iterator[dict[str, Any]]:
    """Names that examples may use; files that they open are in the current folder."""
    folder = tmp_path_factory.mktemp("api")
    (folder / "proteins.fasta").write_text(">first\nMKTAYIAKQR\n>second\nMSILVTRPSP\n>third\nMKV\n")
    (folder / "labelled.fasta").write_text(
        ">first nucleus\nMKTAYIAKQR\n>second membrane\nMSILVTRPSP\n>third nucleus\nMKV\n"
    )
    families = {"sequence": random_sequences([12] * 30), "label": ["first", "second"] * 15}
    pd.DataFrame(families).to_csv(folder / "families.csv", index=False)
    convert([str(folder / "proteins.fasta")], folder / "proteins.store", IngestSection())
    make_embeddings(folder / "vectors", random_vectors(3, 320), ids=["first", "second", "third"])
    save_masked_lm(esm(folder / "esm2"), "esm", vocab_size=33)
    (folder / "classifier").symlink_to(serving.folder / "places")
    (folder / "autoencoder").symlink_to(serving.folder / "autoencoder")
    write_sample(folder, SampleSection(records=60, families=4))
    (folder / "terms.obo").rename(folder / "go.obo")
    truth = (folder / "test.tsv").rename(folder / "truth.tsv").read_text().splitlines()
    save_functions(folder)
    save_diffusion(trained(("helix", "barrel")), folder / "diffusion")
    write_pdb(folder / "fold.pdb", pdb_lines(folds(1)[0]))
    (folder / "predictions.tsv").write_text("".join(f"{line}\t0.5\n" for line in truth))
    with pytest.MonkeyPatch.context() as patch, serving.address(serving.app()) as address:
        patch.chdir(folder)
        singles = [f"{wild}{offset}{letter}" for offset, wild in enumerate("MKTAYIAKQR", 1) for letter in "CDEF"]
        measured = pd.DataFrame({"mutant": singles, "score": np.random.default_rng(0).normal(size=40)})
        fixed = {"esmeray": esmeray, "Path": Path, "address": address, "measured": measured}
        yield {**fixed, "name": "molecular_function"}


def run_examples(name: str, found: dict[str, Any]) -> int:
    """Run the examples of a name and return their number."""
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for test in doctest.DocTestFinder().find(getattr(esmeray, name), name, globs=found):
        test.globs = found  # the finder gives each test its own copy
        runner.run(test, clear_globs=False)
    assert not runner.failures
    return runner.tries


def test_the_example_of_every_name_holds(found: dict[str, Any]):
    returned_or_raised = {"Embeddings", "EsmerayError", "Store"}
    names = {*esmeray.__all__} - {*ORDER, "train", *returned_or_raised}
    assert all(run_examples(name, found) for name in [*ORDER, *names])


def test_the_page_on_python_holds(found: dict[str, Any]):
    page = (REPOSITORY / "docs" / "python.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 7
    text = "\n".join(blocks).replace("runs/locations", "classifier")
    own = {}
    exec(re.sub("facebook/esm2_t6_8M_UR50D|runs/first/export", "esm2", text), own)  # noqa: S102 - the page's own lines
    assert own["vectors"].shape == (2, own["model"].facts.hidden_size) and own["logits"].ndim == 3
    assert {f"`{name}`" for name in esmeray.__all__} <= {*re.findall(r"`\w+`", page)}


def written_by(line: str) -> None:
    """Run a command like the command line."""
    assert run(main, line.split()) == 0


def same_tables(table: pd.DataFrame, path: str, **options: Any) -> None:
    """Test that a table has the text of the table that a command wrote."""
    pd.testing.assert_frame_equal(table, pd.read_csv(path, **options), check_dtype=False, rtol=1e-5)


@pytest.mark.usefixtures("found")
def test_a_scan_is_what_the_command_writes():
    Path("wild.fasta").write_text(">wild\nMKTAYIAKQR\n")
    written_by("mutations scan esm2 --scan.sequence wild.fasta --scan.output scan --scan.first_position 24")
    same_tables(esmeray.scan("esm2", "MKTAYIAKQR", first_position=24), "scan/mutants.csv")
    same_tables(esmeray.scan("esm2", Path("wild.fasta"), output="again", first_position=24), "scan/mutants.csv")
    assert {path.name for path in Path("again").iterdir()} == {path.name for path in Path("scan").iterdir()}


def test_a_fit_and_its_plate_are_what_the_commands_write(found: dict[str, Any]):
    found["measured"].to_csv("measured.csv", index=False)
    Path("wild.fasta").write_text(">wild\nMKTAYIAKQR\n")
    written_by(
        "mutations fit esm2 --fit.sequence wild.fasta --fit.table measured.csv --fit.output by_command "
        "--fit.folds random"
    )
    fit = esmeray.fit_mutants("esm2", "MKTAYIAKQR", found["measured"], "by_call", folds=["random"])
    assert (fit.folder / "evaluation.json").read_text() == Path("by_command/evaluation.json").read_text()
    assert fit.metrics.loc[("random, all training mutants", ""), "mutants"] == len(found["measured"])
    written_by("mutations propose by_command --propose.output plate.csv --propose.number 8")
    same_tables(esmeray.propose(fit.folder, number=8), "plate.csv")


@pytest.mark.usefixtures("found")
def test_hits_are_what_the_command_writes():
    written_by("embed search vectors --search.output hits.tsv --search.top_k 2 --search.metric l2")
    same_tables(esmeray.search("vectors", top_k=2, metric="l2"), "hits.tsv", sep="\t")
    with_queries = esmeray.search("vectors", "vectors", top_k=1)
    assert with_queries["query"].tolist() == with_queries["target"].tolist() == ["first", "second", "third"]


@pytest.mark.usefixtures("found")
def test_alignments_are_what_the_command_writes():
    files = "--align.queries proteins.fasta --align.store proteins.store --align.output aligned.tsv"
    written_by(f"align {files}")
    hits = esmeray.align("proteins.fasta", "proteins.store")
    same_tables(hits, "aligned.tsv", sep="\t", names=[*hits.columns])


@pytest.mark.usefixtures("found")
def test_functions_are_what_the_command_writes():
    written_by("function predict functions --predict.input proteins.fasta --predict.output functions.tsv")
    names = ["protein", "term", "score"]
    same_tables(esmeray.predict_functions("functions", ["proteins.fasta"]), "functions.tsv", sep="\t", names=names)


@pytest.mark.usefixtures("found")
def test_designs_are_what_the_command_writes():
    options = {"number": 3, "steps": 2, "temperature": 0, "known": "proteins.store"}
    words = " ".join(f"--generate.{name} {value}" for name, value in options.items())
    written_by(f"design generate diffusion --generate.structures fold.pdb --generate.output designs {words}")
    table = esmeray.design("diffusion", "fold.pdb", output="other_designs", **options)
    assert Path("other_designs/designs.fasta").read_text() == Path("designs/designs.fasta").read_text()
    assert table["same_as"].tolist() == ["", "fold_A_1", "fold_A_1"] and table["novelty"].between(0, 1).all()


@pytest.mark.usefixtures("found")
def test_an_index_is_what_the_command_writes():
    written_by("embed index vectors --index.output by_command.index --index.metric l2")
    esmeray.build_index(["vectors"], "by_call.index", metric="l2")
    contents = [(Path(f"by_{way}.index") / "esmeray.json").read_text() for way in ("command", "call")]
    assert contents[0] == contents[1]


@pytest.mark.usefixtures("found")
def test_predictions_and_their_evaluation_are_what_the_commands_write():
    written_by("classify predict classifier --predict.input proteins.fasta --predict.output labels.csv")
    same_tables(esmeray.classify("classifier", "proteins.fasta"), "labels.csv")
    labels = "--data.labels.header_field 1"
    written_by(f"classify evaluate classifier --evaluate.input labelled.fasta --evaluate.output report1 {labels}")
    config = {"data.labels.header_field": 1}
    evaluation = esmeray.evaluate("classifier", "labelled.fasta", output="report2", config=config)
    written = [Path(f"report{number}/evaluation.json").read_text() for number in (1, 2)]
    assert written[0] == written[1] and evaluation.metrics["model"].notna().any()


@pytest.mark.usefixtures("process_group")
def test_the_example_of_training_holds(found: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    small = {f"{section}.{key}": value for section, keys in TINY.items() for key, value in keys.items()}
    kept = {key: small[key] for key in small if key.startswith(("data.", "batch.", "model.backbone", "wandb."))}
    small = kept | {"training.warmup_steps": 1, "ray.address": "local", "ray.num_workers": 1}
    monkeypatch.setattr(TaskPlan, "in_process", True)  # without Ray, which takes ten seconds to start
    assert run_examples("train", found | {"small": small})


def test_type_checkers_see_the_names_that_there_are():
    tree = ast.parse(Path(esmeray.__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    seen = {alias.asname: f"{node.module}".removeprefix("esmeray.") for node in imports for alias in node.names}
    assert {name: module for name, module in seen.items() if name is not None} == esmeray._MODULES
    assert {*dir(esmeray)} >= {*esmeray.__all__}
    with pytest.raises(AttributeError, match="nothing"):
        _ = esmeray.nothing


SECTIONS = {
    "align": AlignSection,
    "build_index": IndexSection,
    "choose_layer": LayersSection,
    "classify": ClassifySection,
    "design": GenerateSection,
    "evaluate": ClassifyEvaluateSection,
    "fit_mutants": MutationFitSection,
    "predict_functions": PredictTermsSection,
    "propose": MutationProposeSection,
    "scan": MutationScanSection,
    "search": SearchSection,
}


def in_python(annotation: Any) -> Any:
    """Type of a setting for callers: a path may be a str, and a list may be a tuple."""
    arguments = get_args(annotation)
    if get_origin(annotation) is Annotated:
        return in_python(arguments[0])
    if get_origin(annotation) is list:
        return Sequence[in_python(arguments[0])]
    if get_origin(annotation) in (Union, UnionType):
        return reduce(or_, map(in_python, arguments))
    return str | Path if annotation is Path else annotation


@pytest.mark.parametrize("name", SECTIONS)
def test_settings_of_a_function_have_the_names_and_types_of_their_section(name: str):
    stub: dict[str, Any] = {}
    exec((REPOSITORY / "esmeray" / "inference" / "settings.pyi").read_text(encoding="utf-8"), stub)  # noqa: S102
    parameters = signature(getattr(esmeray, name)).parameters
    settings = stub[parameters["settings"].annotation.removeprefix("Unpack[").removesuffix("]")]
    fields = {key: field for key, field in SECTIONS[name].model_fields.items() if key not in parameters}
    assert settings.__annotations__ == {key: in_python(field.annotation) for key, field in fields.items()}
    assert settings.__total__ is False and not any(field.is_required() for field in fields.values())


def test_the_import_alone_takes_nothing_heavy(tmp_path: Path):
    program = [sys.executable, "-c", "import sys, esmeray; esmeray.EsmerayError; print(*sys.modules)"]
    environment = {"PYTHONPATH": str(Path(esmeray.__file__).parents[1])}
    modules = subprocess.check_output(program, cwd=tmp_path, env=environment, text=True).split()
    assert not {"torch", "ray", "numpy", "pydantic", "transformers"} & {*modules}


def test_every_refusal_is_an_esmeray_error(found: dict[str, Any]):
    score, wild_type = esmeray.score_mutants, "MKTAYIAKQR"
    vectors, store = esmeray.read_embeddings("vectors"), esmeray.open_store("proteins.store")
    calls = [
        *[lambda path=path: esmeray.open_store(path) for path in ("nowhere", "vectors", None)],
        *[lambda path=path: esmeray.read_embeddings(path) for path in ("nowhere", "proteins.store", None)],
        *[lambda key=key: vectors[key] for key in ("unknown", 3, -4, None, 0.5)],
        *[lambda key=key: store.text(key) for key in (3, -1, "first", None)],
        lambda: esmeray.read_embeddings("vectors", "nothing"),
        *[lambda source=source: esmeray.open_model(source) for source in ("nowhere", None, "esm2_t6_8M", "vectors")],
        lambda: esmeray.ClassifierPipeline.load("esm2"),
        *[lambda folder=folder: esmeray.ESM2Autoencoder.from_pretrained(folder) for folder in ("classifier", None)],
        *[lambda wild=wild: score("esm2", wild, ["K2R"]) for wild in ("MK-T", "", None, ["MKT"], b"MKT")],
        *[lambda mutants=mutants: score("esm2", wild_type, mutants) for mutants in ("K2R", None, [None], [b"K2R"])],
        lambda: score("esm2", wild_type, ["K2R"], method="other"),
        lambda: score("esm2", wild_type, ["K2R"], first_position=0),
        *[lambda path=path: esmeray.read_ontology(Path(path)) for path in ("nowhere", "truth.tsv")],
        *[lambda config=config: esmeray.train(config) for config in ("nowhere", None)],
        lambda: esmeray.train("masked_lm", {"training.precision": "fp8"}),
        *[lambda wild=wild: esmeray.scan("esm2", wild) for wild in ("MK-T", "", None, ["MKT"], b"MKT")],
        *[lambda value=value: esmeray.scan("esm2", wild_type, **value) for value in ({"method": "x"}, {"x": 1})],
        *[lambda table=table: esmeray.fit_mutants("esm2", wild_type, table, "no") for table in ("nowhere", None, [1])],
        lambda: esmeray.propose("esm2"),
        *[lambda paths=paths: esmeray.build_index(paths, "no") for paths in ("vectors", None, [], [None], ["esm2"])],
        lambda: esmeray.build_index(["vectors"], None),
        *[lambda path=path: esmeray.classify("classifier", path) for path in ("nowhere", None)],
        *[
            lambda function=function: function("esm2", "proteins.fasta")
            for function in (esmeray.classify, esmeray.evaluate)
        ],
        lambda: esmeray.evaluate("classifier", "labelled.fasta", part="some"),
        lambda: esmeray.align("nowhere", "proteins.store"),
        *[lambda store=store: esmeray.align("proteins.fasta", store) for store in ("nowhere", "vectors", None)],
        *[lambda run=run: esmeray.predict_functions(run, "proteins.fasta") for run in ("nowhere", "classifier", None)],
        *[lambda path=path: esmeray.predict_functions("functions", path) for path in ("nowhere", None, [None])],
        lambda: esmeray.predict_functions("functions", "proteins.fasta", terms=0),
        *[lambda model=model: esmeray.design(model, "fold.pdb") for model in ("nowhere", "esm2", None)],
        *[lambda path=path: esmeray.design("diffusion", path) for path in ("nowhere", None, [], [None])],
        *[
            lambda more=more: esmeray.design("diffusion", **more)
            for more in ({"length": 0}, {"fix": "1"}, {"steps": 0})
        ],
        *[lambda path=path: esmeray.search(path) for path in ("nowhere", "proteins.store")],
        *[lambda more=more: esmeray.search("vectors", **more) for more in ({"top_k": 0}, {"error_rate": 0.1})],
    ]
    for number, call in enumerate(calls):
        with pytest.raises(esmeray.EsmerayError):
            call()
            pytest.fail(f"call {number} was accepted")
    with pytest.warns(UserWarning, match="sequence: 1 record with lower-case letters"):
        scores = score("esm2", wild_type.lower(), ["K2R"], method="wild_type")
    assert scores == score("esm2", wild_type, ["K2R"], method="wild_type")
