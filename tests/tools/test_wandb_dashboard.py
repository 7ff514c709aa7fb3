"""The tool wandb_dashboard writes the workspace without a server, and says in a line when it is not saved."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from benchmarks.fake_wandb_server import fake_wandb_server
from common.command_line import run
from tools import wandb_dashboard


@pytest.fixture(autouse=True)
def account(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A key, and W&B's folders in this test's."""
    monkeypatch.setenv("WANDB_API_KEY", "0123456789" * 4)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("CONFIG", "CACHE", "DATA"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(tmp_path / name))


def sections(spec: dict) -> list[str]:
    return [section["name"] for section in spec["section"]["panelBankConfig"]["sections"]]


def test_specification_goes_to_the_screen_or_a_file(tmp_path, capsys):
    assert run(wandb_dashboard.main, []) == 0
    shown = json.loads(capsys.readouterr().out)
    assert run(wandb_dashboard.main, ["--output", str(tmp_path / "d.json")]) == 0
    written = json.loads((tmp_path / "d.json").read_text())
    assert sections(shown) == sections(written) and "GPUs" in sections(written)


def test_file_that_cannot_be_written_is_one_line(tmp_path, capsys):
    assert run(wandb_dashboard.main, ["--output", str(tmp_path / "absent" / "d.json")]) == 2
    assert "d.json: there is no folder" in capsys.readouterr().err


def test_saved_workspace_is_on_the_server_of_the_keys_own_user(monkeypatch, capsys):
    with fake_wandb_server() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        assert run(wandb_dashboard.main, ["--project", "mine", "--workers", "3", "--save"]) == 0
    (view,) = server.views
    assert (view["entityName"], view["projectName"], view["displayName"]) == ("tester", "mine", "Esmeray")
    assert "worker/2/forward_s" in view["spec"] and "GPUs" in sections(json.loads(view["spec"]))
    assert "/tester/mine?nw=" in capsys.readouterr().out


def test_without_an_account_one_is_asked_for_whatever_the_host(monkeypatch, capsys):
    monkeypatch.delenv("WANDB_API_KEY")
    for name in ("WANDB_IDENTITY_TOKEN_FILE", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    with fake_wandb_server() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        assert run(wandb_dashboard.main, ["--save"]) == 4
        assert server.requests == []
    (line,) = capsys.readouterr().err.splitlines()
    assert "wandb login, or set WANDB_API_KEY" in line
    assert server.url not in line


def test_number_out_of_range_is_one_line(capsys):
    assert run(wandb_dashboard.main, ["--workers", "0"]) == 2
    assert capsys.readouterr().err == "error: --workers: input should be greater than 0, got 0\n"


def test_server_out_of_reach_is_one_line_and_code_4(monkeypatch, capsys):
    with socket.socket() as bound:  # not listening
        bound.bind(("127.0.0.1", 0))
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{bound.getsockname()[1]}")
        assert run(wandb_dashboard.main, ["--save"]) == 4
    (line,) = capsys.readouterr().err.splitlines()
    assert "can't be reached" in line and "WANDB_BASE_URL" in line


def test_server_that_never_answers_is_given_up(monkeypatch, capsys):
    monkeypatch.setattr(wandb_dashboard, "SAVE_LIMIT_S", 3.0)
    with fake_wandb_server("silent") as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        assert run(wandb_dashboard.main, ["--save"]) == 4
    assert "did not answer within 3 s" in capsys.readouterr().err
