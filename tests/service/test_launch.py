"""``serve_ray.py`` refuses settings before Ray starts, and waits for its applications."""

import socket
from pathlib import Path

import pytest

from benchmarks.programs.service import free_port
from esmeray.common.errors import EsmerayError
from esmeray.inference.index.build import IndexSection, make_index
from esmeray.service import launch
from esmeray.service.section import ServiceSettings
from tests.embeddings import make_embeddings, random_vectors
from tests.inference.embedding.jobs import small_model_folder


def test_a_taken_port_or_missing_model_is_refused_before_ray_starts(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("esmeray.cluster.connection.connected", lambda _: pytest.fail("Ray was started"))

    def refusal(model: str, port: int, **more: object) -> str:
        serve = {"models": [model], "port": port, **more}
        settings = ServiceSettings.model_validate({"serve": serve, "ray": {"address": "local"}})
        with pytest.raises(EsmerayError) as refused:
            launch.run(lambda: settings, print)
        return f"{refused.value.exit_code} {refused.value}"

    text = str(tmp_path / "text")
    assert f"2 models: folder {text} not found" in refusal(text, free_port())
    assert "2 models: 'nosuch' is neither a folder nor" in refusal("nosuch", free_port())
    assert "2 models esm2_t6_8M: a model size, not a checkpoint; give" in refusal("esm2_t6_8M", free_port())
    small_model_folder(tmp_path / "small")
    indexed = str(tmp_path / "small"), free_port()
    assert f"3 {text}: no index found" in refusal(*indexed, indexes=[text])
    make_embeddings(tmp_path / "foreign", random_vectors(9, 32), model=None)
    make_index([tmp_path / "foreign"], IndexSection(output=tmp_path / "foreign.index"))
    refused = refusal(*indexed, indexes=[str(tmp_path / "foreign.index")])
    assert "foreign.index: does not name the model of its vectors" in refused
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        where = f"the service can't listen on 127.0.0.1:{port} (Address already in use)"
        assert refusal(text, port) == f"4 serve.port: {where}; choose another"
