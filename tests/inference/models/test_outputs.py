"""An output is one file, and nobody else has a list of them."""

from pathlib import Path

import numpy as np
import pytest

from esmeray.common.errors import ConfigError
from esmeray.inference.embedding.job import run_job
from esmeray.inference.models import outputs
from tests.inference.embedding.jobs import request, vectors
from tests.inference.models.opened import opened, rows_of

NEW_OUTPUT = '''"""The vector of the last residue."""

from esmeray.inference.models.kinds import OutputKind
from esmeray.model.heads.pooling import last_token

KIND = OutputKind("last token", rows=lambda model, features_TD, packed: last_token(features_TD, packed.batch))
'''


def test_a_new_output_is_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "room").mkdir()
    (tmp_path / "room" / "end.py").write_text(NEW_OUTPUT)
    monkeypatch.setattr(outputs, "__path__", [*outputs.__path__, str(tmp_path / "room")])
    job = request(tmp_path, outputs=["end", "residues"], layers=[1])
    run_job(job)
    model = opened(tmp_path / "model")
    assert [output.description for output in model.outputs(["end"], [1])] == ["last token, layer 1"]
    sequence = "MKTAYIAKQR"
    found = rows_of(model, [sequence, "MK"], ["end"], [1])["end_layer_1"]
    assert found.shape == (2, 32)
    assert len(vectors(job.output, "end_layer_1")) == 12
    assert np.isfinite(next(iter(vectors(job.output, "end_layer_1").values()))).all()


def test_an_unknown_output_is_refused_before_a_model_is_opened(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"outputs maen: there is no such output \(did you mean mean\?\)"):
        run_job(request(tmp_path, outputs=["maen"]))
