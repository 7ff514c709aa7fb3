"""``esmeray design fold``: a model that is not there is refused before anything is started."""

import pytest


@pytest.mark.parametrize(
    ("source", "code", "words"),
    [
        ("./nowhere", 2, "error: model: there is no folder ./nowhere\n"),
        (
            "nowhere",
            2,
            "error: model: 'nowhere' is no folder nor a hub name, which has an owner, as facebook/esmfold_v1\n",
        ),
        ("a/b", 4, "error: model: a/b is not in the local cache and the hub can't be reached; give a local folder\n"),
        (".", 2, "error: model: . has no config.json; give a Hugging Face model folder\n"),
    ],
)
def test_a_missing_model_is_refused_as_by_embed_before_ray_is_started(
    command, monkeypatch, tmp_path, source, code, words
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    (tmp_path / "a.fasta").write_text(">a\nMKTAYIAKQR\n")
    monkeypatch.setattr("esmeray.cluster.connection.connected", lambda *_: pytest.fail("Ray was started"))
    outcome = command(f"design fold --fold.input a.fasta --fold.model {source} --fold.cache cache --fold.workers 1")
    assert (outcome.code, outcome.err) == (code, words)
    assert not (tmp_path / "cache").exists()
