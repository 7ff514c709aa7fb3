"""Every command reads a model in its authors' format correctly, or refuses it.

The model is a residue BERT in a pickle, with a vocabulary of capitals without X and without tokenizer settings.
"""

import asyncio
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from scipy.special import log_softmax
from transformers import BertConfig, BertForMaskedLM

import esmeray
from esmeray.common.errors import ConfigError, DataError
from esmeray.dataset.fasta.alphabet import AMINO_ACIDS
from esmeray.inference.embedding.job import run_job
from esmeray.inference.models.opening import open_model
from esmeray.inference.mutations.job import Scorer
from esmeray.inference.mutations.section import MutationsSection
from esmeray.model.backbones.loading import residue_tokenizer
from esmeray.model.export.backbone import export
from esmeray.service.http.app import build_app
from esmeray.service.http.models import Call, Models
from esmeray.service.replicas.replica import ModelReplica
from esmeray.service.section import ServedModel, ServeSection
from esmeray.tasks.autoencoder.model import ESM2Autoencoder
from esmeray.tasks.plan import task_plan
from esmeray.tools.mutations.score import main as score
from esmeray.training.config import Config
from tests.inference.embedding.jobs import request, write_proteins
from tests.model.small_models import save_masked_lm
from tests.model.support import random_sequences

POSITIONS = 42
MAX_NORM = POSITIONS - 2
PROTEINS = random_sequences([20, 25, 30, 40])
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


@pytest.fixture(scope="module")
def network() -> BertForMaskedLM:
    torch.manual_seed(0)
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    config = BertConfig(vocab_size=25, max_position_embeddings=POSITIONS, initializer_range=0.2, **size)
    return BertForMaskedLM(config).eval()


@pytest.fixture(scope="module")
def folder(network, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("published")
    network.config.architectures = ["BertOfSomebody"]
    network.config.to_json_file(folder / "config.json", use_diff=False)
    heads = {f"cls.{name}.weight": torch.ones(3, 32) for name in ("species", "chain")}
    torch.save({**network.state_dict(), **heads}, folder / "pytorch_model.bin")
    (folder / "vocab.txt").write_text("\n".join([*SPECIAL, *AMINO_ACIDS]))
    return folder


@torch.no_grad()
def logits_of(network, text: str, mask: int | None = None) -> np.ndarray:
    ids = [2, *(5 + AMINO_ACIDS.find(letter) if letter in AMINO_ACIDS else 1 for letter in text), 3]
    if mask is not None:
        ids[mask + 1] = SPECIAL.index("[MASK]")
    return network(torch.tensor([ids])).logits[0, 1:-1].numpy()


def test_vectors_are_the_networks_own_and_unused_tensors_are_named(folder, network, capsys):
    model = open_model(folder, device="cpu")
    assert "2 tensors of the checkpoint not loaded: cls.chain, cls.species" in capsys.readouterr().err
    for text, logits in zip(PROTEINS, model.embed(PROTEINS, "logits"), strict=True):
        np.testing.assert_allclose(logits, logits_of(network, text), atol=1e-5)
    assert model.facts.longest == MAX_NORM and not capsys.readouterr().err


def test_a_vocabulary_one_folder_above_is_used_with_a_warning(folder, tmp_path, capsys):
    checkpoint = tmp_path / "checkpoint-10"
    checkpoint.mkdir()
    for name in ("config.json", "pytorch_model.bin"):
        (checkpoint / name).symlink_to(folder / name)
    (tmp_path / "vocab.txt").symlink_to(folder / "vocab.txt")
    expected = open_model(folder, device="cpu").embed(PROTEINS)
    np.testing.assert_array_equal(open_model(checkpoint, device="cpu").embed(PROTEINS), expected)
    assert f"warning: {checkpoint} has no tokenizer; the one in {tmp_path} is used" in capsys.readouterr().err


def test_unknown_residues_are_counted_and_refused_above_half(folder, network, tmp_path, capsys):
    model = open_model(folder, device="cpu")
    with pytest.warns(UserWarning, match=r"^2 residues unknown to the vocabulary \(U, X\), read as \[UNK\]"):
        (logits,) = model.embed(["XMKAU"], "logits")
    np.testing.assert_allclose(logits, logits_of(network, "XMKAU"), atol=1e-5)
    job = request(
        tmp_path, models=[str(folder)], input=[str(write_proteins(tmp_path / "a.fasta", [*PROTEINS, "AXXA"]))]
    )
    (report,) = run_job(job)
    assert report["unknown"] == "2 residues unknown to the vocabulary (X), read as [UNK]"
    for texts in (["AXXX"], ["XX", "A"]):
        with pytest.raises(DataError, match=r"residues unknown to the vocabulary .*, more than half of"):
            model.embed(texts)
    table = write_table(tmp_path, ["M1A"])
    (tmp_path / "wild.fasta").write_text(">wild\nMKXA\n")
    files = ["--score.sequence", f"{tmp_path}/wild.fasta", "--score.output", f"{tmp_path}/scores.csv"]
    score([str(folder), "--score.table", str(table), *files])
    assert "1 residue unknown to the vocabulary (X)" in capsys.readouterr().err


def test_an_esm2_in_a_pickle_is_the_one_in_safetensors(tmp_path):
    own = tmp_path / "esm"
    state = save_masked_lm(own, "esm").state_dict()
    expected = open_model(own, device="cpu").embed(PROTEINS)
    torch.save(state, own / "pytorch_model.bin")
    (own / "model.safetensors").unlink()
    np.testing.assert_allclose(open_model(own, device="cpu").embed(PROTEINS), expected, atol=1e-5)


def test_a_pseudo_log_likelihood_leaves_out_letters_without_a_probability(folder, network):
    proteins, expected = [PROTEINS[0], "MKXAU"], []
    for text in proteins:
        known = [offset for offset, letter in enumerate(text) if letter in AMINO_ACIDS]
        logs = [log_softmax(logits_of(network, text, offset)[offset].astype(float)) for offset in known]
        values = [row[5 + AMINO_ACIDS.index(text[offset])] for row, offset in zip(logs, known, strict=True)]
        expected.append([np.mean(values), sum(values), len(values)])
    with pytest.warns(UserWarning, match="2 residues unknown"):
        rows = open_model(folder, device="cpu").embed(proteins, "pseudo_log_likelihood", tokens=60)
    np.testing.assert_allclose(rows, expected, rtol=1e-5)


def write_table(folder: Path, mutants: list[str]) -> Path:
    (folder / "mutants.csv").write_text("\n".join(["mutant", *mutants]) + "\n")
    return folder / "mutants.csv"


def test_a_vocabulary_without_x_and_without_an_unknown_token_refuses_x(folder, network, tmp_path):
    for name in ("config.json", "pytorch_model.bin"):
        (tmp_path / name).symlink_to(folder / name)
    # The row stays, with a name that is not a letter.
    words = (folder / "vocab.txt").read_text().replace("[UNK]", "[unused1]")
    (tmp_path / "vocab.txt").write_text(words)
    model = open_model(tmp_path, device="cpu")
    np.testing.assert_allclose(model.embed(["MKA"], "logits")[0], logits_of(network, "MKA"), atol=1e-5)
    with pytest.raises(DataError, match=r"1 residue unknown to the vocabulary \(X\), which has no unknown token"):
        model.embed(["MKXA"])


def test_scores_and_probabilities_use_the_models_own_mask(folder, network):
    text = PROTEINS[0]
    masked = np.array([logits_of(network, text, offset)[offset, 5:] for offset in range(len(text))], np.float64)
    shares = np.exp(masked) / np.exp(masked).sum(1, keepdims=True)
    letter = next(letter for letter in AMINO_ACIDS if letter != text[2])
    expected = np.log(shares[2, AMINO_ACIDS.index(letter)] / shares[2, AMINO_ACIDS.index(text[2])])
    assert esmeray.score_mutants(folder, text, [f"{text[2]}3{letter}"], device="cpu") == pytest.approx(
        expected, abs=1e-5
    )
    served = ServedModel(name="bert", source=str(folder), precision="fp32")
    replica = ModelReplica(served.model_dump(), "cpu", "1")
    models = Models({"bert": Call(replica.about, replica.run, replica.tokens)})
    app = build_app(ServeSection(models=[served]), models)

    bodies = [
        {"sequences": [text], "method": "masked"},
        {"sequences": [f"{text[:2]}<mask>{text[3:]}"]},
        {"sequences": [f"{text}X"]},
        {"sequences": ["XXA"]},
    ]

    async def answers() -> list[httpx.Response]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as client:
            return [await client.post("/v1/masked", json=body) for body in bodies]

    every, hidden, counted, refused = asyncio.run(answers())
    np.testing.assert_allclose(every.json()["data"][0]["probabilities"], shares, atol=1e-5)
    np.testing.assert_allclose(hidden.json()["data"][0]["probabilities"][2], shares[2], atol=1e-5)
    assert counted.headers["x-unknown-residues"] == "1 residue unknown to the vocabulary (X), read as [UNK]"
    assert refused.status_code == 422 and "more than half" in refused.text


def test_lengths_beyond_the_models_limit_are_refused(folder, tmp_path):
    fasta = write_proteins(tmp_path / "a.fasta", PROTEINS)
    with pytest.raises(ConfigError, match=rf"max_length 41: the model supports at most {MAX_NORM} residues"):
        run_job(request(tmp_path, models=[str(folder)], input=[str(fasta)], max_length=MAX_NORM + 1))
    with pytest.raises(ConfigError, match=rf"max_length 41: .* supports at most {MAX_NORM} residues"):
        Scorer(str(folder), MutationsSection(device="cpu", max_length=MAX_NORM + 1), tmp_path)
    assert Scorer(str(folder), MutationsSection(device="cpu"), tmp_path).max_length == MAX_NORM
    settings = {"model": {"task": "masked_lm", "backbone": {"source": str(folder)}}, "data": {"source": [str(fasta)]}}
    config = Config.model_validate(settings)  # the default of data.max_length, with texts that the model takes
    size = task_plan(config.data, config.model).estimate()
    assert size.parameters.total > 0
    longer = config.data.model_copy(update={"max_length": MAX_NORM + 1})
    with pytest.raises(ConfigError, match=rf"max_length 41: this backbone supports at most {MAX_NORM} tokens"):
        task_plan(longer, config.model).prepare(tmp_path / "stores")


def test_training_refuses_longer_sequences_before_it_starts(folder, tmp_path):
    fasta = write_proteins(tmp_path / "a.fasta", [*PROTEINS, "MXXK"])
    settings = {"model": {"task": "masked_lm", "backbone": {"source": str(folder)}}, "data": {"source": [str(fasta)]}}
    config = Config.model_validate(settings)
    plan = task_plan(config.data, config.model)
    path = plan.prepare(tmp_path / "stores")
    assert plan.measure(path).data.unknown == "2 residues unknown to the vocabulary (X), read as [UNK]"
    autoencoder = ESM2Autoencoder.build(config.model, seed=0)
    with pytest.warns(UserWarning, match=r"^1 residue unknown to the vocabulary \(X\), read as \[UNK\]"):
        autoencoder.encode(["MKXA"])
    exported = export(autoencoder, tmp_path / "autoencoder", residue_tokenizer(config.model.backbone))
    assert open_model(exported, device="cpu").facts.unknown == autoencoder.backbone.unknown_letters
    long = write_proteins(tmp_path / "b.fasta", random_sequences([MAX_NORM + 1, 9, 8]))
    plan = task_plan(config.data.model_copy(update={"source": [str(long)]}), config.model)
    with pytest.raises(ConfigError, match=rf"\(the longest text has {MAX_NORM + 1}\); set it to at most {MAX_NORM}"):
        plan.measure(plan.prepare(tmp_path / "stores"))
