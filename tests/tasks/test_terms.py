"""The task of function prediction: held-out proteins, refusals, and training of the network."""

from pathlib import Path

import numpy as np
import pytest

from esmeray.common.errors import ConfigError, DataError
from esmeray.dataset.section import DataSection, IngestSection, SampleSection
from esmeray.dataset.store.conversion import convert
from esmeray.function.proteins import LabelledTerms, prepare, read
from esmeray.function.sample import write_sample
from esmeray.tasks.plan import task_plan
from esmeray.training.config import load_config
from tests.runs import exported_weights, tiny_config, train_losses
from tests.training.runs import prepared as prepared_run
from tests.training.runs import train


@pytest.fixture
def files(tmp_path) -> dict:
    (tmp_path / "made").mkdir()
    write_sample(tmp_path / "made", SampleSection(records=60, families=12))
    names = {"annotations": "train.tsv", "ontology": "terms.obo"}
    return {key: str(tmp_path / "made" / name) for key, name in names.items()}


def section(folder: Path, terms: dict, **data) -> DataSection:
    given = {"source": [str(folder / "made" / "train.fasta")], "validation_share": 0.1, "terms": terms}
    return DataSection.model_validate(given | data)


def prepared(folder: Path, terms: dict, **data):
    return read(prepare(section(folder, terms, **data), folder / "stores"))


def held_out(data) -> set[str]:
    return {data.ids[record] for record in data.held_out.tolist()}


def test_data_of_a_store_is_that_of_its_files_and_propagated(files, tmp_path):
    convert([str(tmp_path / "made" / "train.fasta")], tmp_path / "store", IngestSection())
    first, again = prepared(tmp_path, files), prepared(tmp_path, files, source=[str(tmp_path / "store")])
    assert held_out(first) == held_out(again) and first.store.checksum == again.store.checksum
    for name, aspect in first.aspects.items():
        other = again.aspects[name]
        assert (aspect.terms != other.terms).nnz == 0 and (aspect.accretion == other.accretion).all()
        assert not ((aspect.terms @ aspect.aspect.parents) > aspect.terms).nnz, "annotations are propagated"


def test_settings_that_do_not_go_together_are_refused(tmp_path):
    for given, words in (
        ({("data", "terms", "annotations"): "a.tsv"}, "must both be set"),
        ({("data", "terms", "since"): "2024"}, "since"),
        ({("data", "terms", "since"): "20240101", ("data", "terms", "validation"): "a"}, "are mutually exclusive"),
        ({("model", "terms", "parts"): ["guess"]}, "parts"),
        ({("model", "terms", "embeddings", "store"): "embeddings"}, "set model"),
    ):
        with pytest.raises(ConfigError, match=words):
            load_config(None, given)
    with pytest.raises(ConfigError, match="must all be set"):
        prepare(DataSection(source=["a.fasta"]), tmp_path)


def test_terms_are_known_in_the_aspects_that_a_protein_is_annotated_in(files, tmp_path):
    lines = Path(files["annotations"]).read_text().splitlines(keepends=True)
    name = lines[0].split("\t")[0]
    Path(files["annotations"]).write_text("".join([lines[0], *(line for line in lines if not line.startswith(name))]))
    labelled = LabelledTerms(prepare(section(tmp_path, files), tmp_path / "stores"), min_count=3)
    record = labelled.data.ids.index(name)
    (row_K,) = labelled.targets[np.array([record])]
    aspects = [aspect for aspect in labelled.data.aspects.values() if record in aspect.records]
    terms = {term for aspect in aspects for term in aspect.aspect.terms}
    known = {term for term, value in zip(labelled.label_space.names, row_K, strict=True) if not np.isnan(value)}
    assert len(aspects) == 1 and known == terms & set(labelled.label_space.names)
    with pytest.raises(DataError, match=r"lower data\.terms\.min_count"):
        LabelledTerms(labelled.path, min_count=1000)


@pytest.mark.parametrize("network", ["vectors", "backbone"])
def test_network_learns_terms_and_starts_from_their_shares(process_group, files, tmp_path, network):
    """A backbone (with LoRA) learns the same sparse targets as a head on vectors."""
    data = {"terms": files | {"min_count": 5}, "source": [str(tmp_path / "made" / "train.fasta")]}
    model = {"task": "terms", "terms": {"network": network}, "classifier": {"best_metric": "loss"}}
    model |= {"backbone": {"lora": {"rank": 2 if network == "backbone" else 0}}}
    config = tiny_config(tmp_path, data=data, model=model, batch={"tokens": 4096, "global_tokens": 4096})
    path = prepared_run(config)
    assert task_plan(config.data, config.model).measure(path).parameters.trainable > 0
    assert train(config, path).status == "finished"
    losses = list(train_losses(config).values())
    assert losses[-1] < losses[0] and exported_weights(config)
