"""A model fitted to labelled proteins embeds other proteins near their relatives; unsuitable labels are refused."""

import json
from pathlib import Path

import numpy as np
import pytest

from esmeray.common.errors import DataError
from esmeray.dataset.embeddings.reader import open_vectors
from esmeray.dataset.store.sample import sample_records
from esmeray.inference.index.search import open_index
from esmeray.inference.models.opening import open_model
from esmeray.inference.retrieval.metrics import in_training
from esmeray.tools.embed import fit
from tests.dataset.stores import write_fasta

FIT = "embed fit --fit.input learnt.fasta --fit.labels labels.csv --fit.level 1 --fit.output"


@pytest.fixture
def families(tmp_path: Path, monkeypatch) -> dict[str, str]:
    """Sequences of 8 families with 16 members each: 12 per family are in learnt.fasta, 4 in new.fasta."""
    monkeypatch.chdir(tmp_path)
    members = list(sample_records(128, 8, seed=0))
    write_fasta(Path("learnt.fasta"), [(name, text) for name, text in members if name[-4:] < "0012"])
    write_fasta(Path("new.fasta"), [(name, text) for name, text in members if name[-4:] >= "0012"])
    labels = [f"{name},{name[:9]}.{int(name[-4:]) % 3}" for name, _ in members]
    Path("labels.csv").write_text("\n".join(["id,label", *labels]))
    return dict(members)


@pytest.mark.slow
def test_new_members_lie_near_their_family(command, families):
    outcome = command.done(f"{FIT} model")
    assert "96 proteins in 8 groups" in outcome.out
    assert float(outcome.out.split("; ")[1].split("%")[0]) > 90, "what a regression on all others names"
    vectors = {}
    for part in ("learnt", "new"):
        command.done(
            f"embed run --embed.models model --embed.outputs relatives --embed.input {part}.fasta --embed.output {part}"
        )
        rows = open_vectors(Path(part))
        vectors |= dict(zip(rows.ids, rows[:] / np.linalg.norm(rows[:], axis=1, keepdims=True), strict=True))
    learnt = [name for name in vectors if name[-4:] < "0012"]
    cosines = np.array([*vectors.values()]) @ np.array([vectors[name] for name in learnt]).T
    is_of_family = np.array([[name[:9] == other[:9] for other in learnt] for name in vectors])
    is_learnt = np.isin([*vectors], learnt)
    assert cosines[is_learnt][is_of_family[is_learnt]].min() > 0.95
    assert abs(cosines[is_learnt][~is_of_family[is_learnt]]).max() < 0.2
    nearest = cosines[~is_learnt].argmax(1)
    assert is_of_family[~is_learnt][np.arange(32), nearest].mean() > 0.9
    command.done("embed index learnt new --index.output index")
    index = open_index("index")
    trained_N, words = in_training(index.folder, index.sequences(np.arange(128)))
    assert trained_N.tolist() == [True] * 96 + [False] * 32 and "96 of 128 proteins" in words
    evaluate = "embed evaluate learnt --evaluate.labels labels.csv --evaluate.output learnt.json"
    assert "96 of 96 proteins were in the training data of the fitted model (96 proteins)" in command.done(evaluate).out
    result = json.loads(Path("learnt.json").read_text())
    assert result["proteins_in_training"] == 96 and "levels_without_training" not in result, "none is left"


@pytest.mark.slow
def test_a_fitted_vector_is_the_same_bytes_in_any_batch(command, families, monkeypatch):
    monkeypatch.setattr(fit, "CHANNELS", 4)
    for model in ("model", "again"):
        command.done(f"{FIT} {model} --fit.learnt 50")
    for name in ("relatives.safetensors", "training.npy"):
        assert Path("model", name).read_bytes() == Path("again", name).read_bytes()
    model = open_model("model", device="cpu")
    together = model.embed([*families.values()], "relatives")
    assert together.shape == (128, 4)
    alone = [model.embed([text], "relatives")[0] for text in families.values()]
    assert np.array(alone).tobytes() == together.tobytes()


def test_what_can_not_be_fitted_or_was_damaged_is_refused(command, families):
    command.refused(3, "at least two groups", f"{FIT} model --fit.level 7")
    command.refused(3, "no column", f"{FIT} model --fit.label_column absent")
    assert not Path("model").exists() and not Path("model.partial").exists()
    command.done(f"{FIT} model")
    command.refused(2, "already exists", f"{FIT} model")
    weights = Path("model/relatives.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x55")
    with pytest.raises(DataError, match=r"relatives\.safetensors"):
        open_model("model", device="cpu")
