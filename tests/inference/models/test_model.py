"""Embeddings equal transformers' on single sequences, for each architecture, output and layer."""

from collections.abc import Callable
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer, EsmForMaskedLM

from esmeray.common.errors import ConfigError, DataError, EsmerayError, ForkedError
from esmeray.common.processor import cpu_computes_bf16
from esmeray.dataset.tokens.base import EsmSequenceTokenizer
from esmeray.inference.classifier import ClassifierPipeline
from esmeray.inference.models.opening import open_model
from esmeray.model.export.backbone import export
from esmeray.tasks.autoencoder.model import ESM2Autoencoder
from tests.classifiers import export_tiny, tiny_model
from tests.dataset.tokenizer_folders import ankh, esm, esmc, prot_bert, prot_t5
from tests.inference.models.opened import opened, rows_of
from tests.model.small_models import save_masked_lm, save_small_model
from tests.model.support import build_model, random_sequences, tiny_section

FOLDERS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "ESM-2": (esm, "esm"),
    "ESM C": (esmc, "esmc"),
    "ProtBERT": (prot_bert, "bert"),
    "ProtT5": (prot_t5, "t5"),
    "Ankh": (ankh, "t5"),
}
LENGTHS = [7, 31, 1, 18]
SEQUENCES = random_sequences(LENGTHS)


def model_folder(path: Path, name: str) -> tuple[Path, Any]:
    make, model_type = FOLDERS[name]
    folder = make(path / "model")
    vocabulary = 33 if model_type == "esm" else 64 if model_type == "esmc" else 140
    return folder, save_small_model(folder, model_type, vocab_size=vocabulary)


def reference(folder: Path, model: Any, special: tuple[int, int]) -> dict[int, list[Tensor]]:
    """Residue vectors of each sequence alone, after each layer."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    own = opened(folder).tokenizer
    layers: dict[int, list[Tensor]] = {}
    for sequence in SEQUENCES:
        text = " ".join(sequence) if getattr(own, "spaced", False) else sequence
        ids = tokenizer(text, return_tensors="pt").input_ids
        if ids.shape[1] != len(sequence) + sum(special):  # Ankh: transformers 5 reads its tokenizer differently
            ids = torch.tensor([[*own.encode([sequence])[0].tolist(), *own.suffix]])
        with torch.no_grad():
            output = model(input_ids=ids, output_hidden_states=True)
        states = [*output.hidden_states[:-1], output.last_hidden_state]
        for layer, state in enumerate(states):
            layers.setdefault(layer, []).append(state[0, special[0] : state.shape[1] - special[1]])
    return layers


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_vector_is_the_same_bytes_whatever_shares_its_batch(precision: str, tmp_path: Path):
    """Libraries split a matmul's sums differently for 1 to 16 rows, and in bf16 for fewer than 777."""
    if precision == "bf16" and not cpu_computes_bf16():
        pytest.skip("products of bf16 without instructions for it are sums in order")
    size = {"hidden_size": 128, "intermediate_size": 1280, "num_attention_heads": 8, "num_hidden_layers": 1}
    save_masked_lm(tmp_path, "esm", vocab_size=33, **size)
    sequences = random_sequences([1, 2, 300, 5, 600, 12])
    model = opened(tmp_path, precision=precision)
    for output in ("residues", "logits"):
        expected = [*model.embed(sequences, output)]
        ways = {
            "another budget": model.embed(sequences, output, tokens=400),
            "another order": model.embed(sequences[::-1], output)[::-1],
            "alone": [model.embed([sequence], output)[0] for sequence in sequences],
        }
        for way, vectors in ways.items():
            assert all(map(np.array_equal, expected, vectors)), f"{output}, {way}"


@pytest.mark.parametrize("name", FOLDERS)
def test_proteins_and_residues_of_each_layer_equal_transformers(tmp_path: Path, name: str):
    folder, network = model_folder(tmp_path, name)
    special = (0, 1) if name in ("ProtT5", "Ankh") else (1, 1)
    wanted = reference(folder, network, special)
    layers = sorted(wanted)
    found = rows_of(opened(folder), SEQUENCES, ["mean", "max", "residues"], layers)
    half = rows_of(opened(folder, precision="bf16"), SEQUENCES, ["mean", "residues"], layers)
    for layer in layers:
        rows = torch.cat(wanted[layer])
        scale = rows.abs().max()
        means = torch.stack([row.mean(0) for row in wanted[layer]])
        largest = torch.stack([row.amax(0) for row in wanted[layer]])
        assert (found[f"residues_layer_{layer}"] - rows).abs().max() <= 1e-5 * scale
        assert (found[f"mean_layer_{layer}"] - means).abs().max() <= 1e-5 * scale
        assert (found[f"max_layer_{layer}"] - largest).abs().max() <= 1e-5 * scale
        for ours, theirs in ((half[f"residues_layer_{layer}"], rows), (half[f"mean_layer_{layer}"], means)):
            assert torch.cosine_similarity(ours.float(), theirs).min() >= 0.999


def test_first_token_logits_and_contacts_equal_transformers(tmp_path: Path):
    folder = esm(tmp_path / "model")
    network: EsmForMaskedLM = save_masked_lm(folder, "esm", vocab_size=33)
    found = rows_of(opened(folder), SEQUENCES, ["cls", "logits", "contacts"])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    network.set_attn_implementation("eager")
    logits, contacts, first = [], [], []
    for sequence in SEQUENCES:
        ids = tokenizer(sequence, return_tensors="pt")
        with torch.no_grad():
            logits.append(network(**ids).logits[0, 1:-1])
            first.append(network.esm(**ids).last_hidden_state[0, 0])
            contacts.append(network.esm.predict_contacts(ids.input_ids, ids.attention_mask)[0].reshape(-1, 1))
    for name, rows in (("logits", torch.cat(logits)), ("contacts", torch.cat(contacts)), ("cls", torch.stack(first))):
        assert found[name].shape == rows.shape
        assert (found[name] - rows).abs().max() <= 1e-5 * rows.abs().max()


def test_windows_average_the_residues_that_they_share(tmp_path: Path):
    folder, _ = model_folder(tmp_path, "ESM-2")
    model = opened(folder)
    outputs = model.outputs(["mean", "max", "cls", "residues"])
    (sequence,) = random_sequences([31])
    starts = [0, 8, 16, 19]
    parts = [rows_of(model, [sequence[start : start + 12]], ["residues", "cls"]) for start in starts]
    sums, counts = torch.zeros(31, 32), torch.zeros(31, 1)
    for start, part in zip(starts, parts, strict=True):
        sums[start : start + 12] += part["residues"]
        counts[start : start + 12] += 1
    found = model.rows_over_windows(sequence.encode(), outputs, length=12, overlap=4, token_budget=30)
    wanted = {"residues": sums / counts, "mean": (sums / counts).mean(0, keepdim=True)}
    wanted |= {"max": (sums / counts).amax(0, keepdim=True), "cls": torch.stack([p["cls"] for p in parts]).mean(0)}
    for name, rows in wanted.items():
        assert (found[name] - rows).abs().max() <= 1e-5 * rows.abs().max()


def test_an_autoencoder_gives_latents_and_a_classifier_its_backbone(tmp_path: Path):
    run = tmp_path / "run"
    run.mkdir()
    export(build_model(tiny_section(), 0), run / "export", EsmSequenceTokenizer())
    model = opened(run)  # a run folder with an export
    wanted = ESM2Autoencoder.from_pretrained(run / "export").encode(SEQUENCES)
    found = rows_of(model, SEQUENCES, ["latents", "mean_latents"])
    assert torch.allclose(found["latents"], torch.cat(wanted), atol=1e-5)
    assert torch.allclose(found["mean_latents"], torch.stack([rows.mean(0) for rows in wanted]), atol=1e-5)
    half = rows_of(opened(run, precision="bf16"), SEQUENCES, ["latents"])["latents"]
    assert torch.cosine_similarity(half, found["latents"]).min() >= 0.99
    exported = export_tiny(tmp_path / "classifier")
    assert rows_of(opened(exported), SEQUENCES)["mean"].shape[0] == len(SEQUENCES)


def test_models_on_one_backbone_share_its_cached_features_and_no_latents(tmp_path: Path):
    model = build_model(tiny_section(), 0)
    first = opened(export(model, tmp_path / "first", EsmSequenceTokenizer()))
    with torch.no_grad():
        for parameter in model.encoder.parameters():
            parameter.add_(0.01)
    second = opened(export(model, tmp_path / "second", EsmSequenceTokenizer()))
    for name in ("mean", "latents"):
        keys = [own.cache_key(own.outputs([name])[0], 100, "start") for own in (first, second)]
        assert (keys[0] == keys[1]) == (name == "mean")


def test_the_fingerprint_follows_the_weights_and_not_the_name(tmp_path: Path):
    folder, network = model_folder(tmp_path, "ESM-2")
    copied = esm(tmp_path / "copied")
    network.save_pretrained(copied)
    assert opened(folder).facts.fingerprint == opened(copied).facts.fingerprint
    with torch.no_grad():
        network.encoder.layer[1].output.dense.bias[3] += 1e-3
    network.save_pretrained(copied)
    assert opened(folder).facts.fingerprint != opened(copied).facts.fingerprint
    with torch.no_grad():
        network.encoder.layer[1].intermediate.dense.weight[0, 0] = np.nan
    network.save_pretrained(folder)
    with pytest.raises(DataError, match=r"encoder\.layer\.1\.intermediate\.dense\.weight contain NaN"):
        opened(folder)


def test_every_call_cleans_its_sequences_and_refuses_others(tmp_path: Path):
    model = opened(model_folder(tmp_path, "ESM-2")[0])
    classifier, autoencoder = ClassifierPipeline(tiny_model(kind="per_residue")), build_model(tiny_section(), 0)
    for argument, call in (
        ("sequences", model.embed),
        ("texts", lambda texts: classifier.predict(texts).probabilities),
        ("sequences", lambda sequences: torch.cat(autoencoder.encode(sequences))),
    ):
        expected = call(["MKTAYIAKQR", "MSILX"])
        with pytest.warns(
            UserWarning, match=f"{argument}: 1 record with lower-case letters, converted to upper case; 1 final"
        ):
            found = call(np.array(["mktayiakqr", "MSI\nLX*"]))
        np.testing.assert_array_equal(found, expected)
        for sequence in ("MK1", "MK-T", "M<mask>", ">a\nMKT", "M*K", "", None, float("nan"), b"MKT"):
            with pytest.raises(DataError, match=rf"{argument}\[1\]"):
                call(["MKT", sequence])
        with pytest.raises(ConfigError, match=f"{argument}: expected a list of str, found "):
            call("MKTAYIAKQR")


def test_a_sequence_beyond_the_models_positions_is_refused_by_its_number(tmp_path: Path):
    model = opened(model_folder(tmp_path, "ProtBERT")[0])
    longest = model.facts.longest
    assert longest is not None and model.embed(["A" * longest]).shape == (1, model.facts.hidden_size)
    with pytest.raises(
        DataError, match=rf"sequences\[1\]: {longest + 1} tokens, more than the model's maximum of {longest}"
    ):
        model.embed(["MKT", "A" * (longest + 1)])


def test_a_model_refuses_to_compute_in_a_forked_child(tmp_path: Path):
    folder = model_folder(tmp_path, "ESM-2")[0]
    model, pipeline = opened(folder), ClassifierPipeline.load(export_tiny(tmp_path / "classifier"), device="cpu")
    export(build_model(tiny_section(), 0), tmp_path / "autoencoder", EsmSequenceTokenizer())
    autoencoder = ESM2Autoencoder.from_pretrained(tmp_path / "autoencoder")
    model.embed(["MKT"])
    uses = [(model.embed, ["MKT"]), (pipeline.predict, ["MKT"]), (autoencoder.encode, ["MKT"]), (opened, folder)]
    with get_context("fork").Pool(1) as pool:
        for use, argument in uses:  # a pickled bound method contains the model, which the child process opens again
            with pytest.raises(ForkedError, match="opened before this process was forked"):
                pool.apply_async(use, [argument]).get(60)
    assert model.embed(["MKT"]).shape == (1, 32)


WRONG_OUTPUTS = [{"output": "nothing"}, {"output": ["mean"]}, {"layer": "a"}, {"tokens": 0}, {"layer": None}]
WRONG_SETTINGS = [{"precision": "fp8"}, {"device": "meta"}, {"stream": "no way"}, {"weights": "int4"}, {"device": 1.5}]


def test_what_a_model_has_not_is_refused(tmp_path: Path):
    model = opened(model_folder(tmp_path, "ESM-2")[0])
    # The folder has no masked language modelling head, and a new, random head would predict noise.
    for words, call, arguments in [
        ("random", opened, {"source": "esm2_t6_8M"}),
        ("this model; available: cls, contacts", model.outputs, {"kinds": ["latents"]}),
        ("this model; available: cls, contacts", model.outputs, {"kinds": ["logits"]}),
        ("this model; available: cls, contacts", model.outputs, {"kinds": ["pseudo_log_likelihood"]}),
        ("the model has 2 layers", model.outputs, {"layers": [3]}),
        *[("", partial(model.embed, ["MKT"]), wrong) for wrong in WRONG_OUTPUTS],
        *[(next(iter(wrong)), partial(open_model, tmp_path / "model"), wrong) for wrong in WRONG_SETTINGS],
    ]:
        with pytest.raises(EsmerayError, match=words):
            call(**arguments)
