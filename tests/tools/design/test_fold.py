"""``esmeray design fold`` refuses a missing model before it starts."""

import pytest


def test_a_missing_model_is_refused_as_by_embed_before_ray_is_started(command, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    (tmp_path / "a.fasta").write_text(">a\nMKTAYIAKQR\n")
    monkeypatch.setattr("esmeray.cluster.connection.connected", lambda *_: pytest.fail("Ray was started"))
    for source, code, words in [
        ("./nowhere", 2, "folder ./nowhere not found"),
        ("nowhere", 2, "'nowhere' is neither a folder nor a hub name (OWNER/NAME, e.g. facebook/esmfold_v1)"),
        ("a/b", 4, "a/b is not in the local cache and the hub can't be reached; give a local folder"),
        (".", 2, ". has no config.json; give a Hugging Face model folder"),
    ]:
        fold = f"design fold --fold.input a.fasta --fold.model {source} --fold.cache cache --fold.workers 1"
        command.refused(code, f"error: model: {words}\n", fold)
    assert not (tmp_path / "cache").exists()
