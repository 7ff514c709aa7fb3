"""An exported folder opens in transformers and in Esmeray with the same output, and never unpickles."""

import json
import logging
import pickle
import re

import pytest
import torch

from esmeray.common.errors import DataError, ResourceError
from esmeray.common.publishing import MADE_FILE
from esmeray.dataset.tokens.esm import pack_sequences
from esmeray.model.export.backbone import export
from esmeray.model.heads.normalization import FeatureStatistics
from esmeray.tasks.autoencoder.model import ESM2Autoencoder
from tests.model.backbones.test_loading import Malicious
from tests.model.support import assert_near, build_model, random_sequences, residue_batch, tiny_section

SEQUENCES = random_sequences([25, 1, 60])


@pytest.fixture
def masked_lm():
    return build_model(tiny_section("masked_lm"), seed=4).eval()


@pytest.fixture
def autoencoder():
    model = build_model(tiny_section("autoencoder"), seed=4)
    assert isinstance(model, ESM2Autoencoder)
    statistics = FeatureStatistics(model.backbone.hidden_size)
    model.measure(residue_batch(SEQUENCES), statistics)
    model.normalization.set(statistics)
    return model


def test_card_and_config_describe_the_run(tmp_path, autoencoder):
    facts = {"training_data": "10,000 proteins", "metrics": {"feature_r2": 0.912345678, "residue|recovery": 0.5}}
    folder = export(autoencoder, tmp_path / "model", resolved_config="run:\n  name: a\n", model_card_facts=facts)
    card = (folder / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n")
    assert "from 32 to 8 channels (4 times)" in card and "10,000 proteins" in card
    assert "| feature_r2 | 0.912346 |" in card and "| torch |" in card and "residue\\|recovery" in card
    assert (folder / "config.yaml").read_text() == "run:\n  name: a\n"


@pytest.mark.parametrize(("task", "architecture"), [("autoencoder", "EsmModel"), ("masked_lm", "EsmForMaskedLM")])
def test_code_of_the_card_loads_every_weight_and_gives_equal_features(
    tmp_path, request, task, architecture, caplog, monkeypatch
):
    model = request.getfixturevalue(task).eval()
    folder = export(model, tmp_path / "model")
    suffixes = {path.suffix for path in folder.rglob("*") if path.is_file()}
    assert suffixes == {".json", ".safetensors", ".txt", ".md"}
    config = (folder / "config.json").read_text()
    assert "esmeray" not in config and "attn" not in config
    assert json.loads(config)["architectures"] == [architecture]
    blocks = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), flags=re.DOTALL)
    assert len(blocks) == (2 if task == "autoencoder" else 1)
    names: dict = {}
    with monkeypatch.context() as patch:
        patch.setattr(logging.getLogger("transformers"), "propagate", True)
        for block in blocks:
            exec(compile(block.replace("FOLDER", str(folder)), "card", "exec"), names)  # noqa: S102
    assert not caplog.records, "such as weights of a pooler that are made up"
    with torch.no_grad():
        features = model.backbone(pack_sequences(["MKTAYIAKQR"]))
        if task == "autoencoder":
            assert_near(names["features"][0], features)
        else:
            assert_near(names["logits"][0], model.lm_head(features))


def test_an_export_to_a_full_disk_leaves_nothing(tmp_path, masked_lm, full_disk):
    with full_disk(16_384), pytest.raises(ResourceError, match="no space left"):
        export(masked_lm, tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_a_pickle_planted_in_an_export_never_runs(tmp_path, autoencoder):
    folder = export(autoencoder, tmp_path / "model")
    payload = pickle.dumps(Malicious(tmp_path / "pwned"))
    (folder / "autoencoder.pt").write_bytes(payload)
    ESM2Autoencoder.from_pretrained(folder)
    (folder / MADE_FILE).unlink()  # an attacker could rewrite this file, too
    for name in ("autoencoder.safetensors", "model.safetensors"):
        (folder / name).write_bytes(payload)
        with pytest.raises(DataError, match=r"damaged|can't be read"):
            ESM2Autoencoder.from_pretrained(folder)
    assert not (tmp_path / "pwned").exists()
