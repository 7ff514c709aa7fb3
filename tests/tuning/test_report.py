"""The report of a search: one page that needs nothing else, with every trial and what became of it."""

from __future__ import annotations

import base64
import json
import re
from copy import deepcopy
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from matplotlib import image

from train_config.loading import dump_config, load_config
from train_config.schema import Config
from train_config.tune_schema import TuneConfig
from tuning.report import HTML_FILE, PNG_FILE, own_trial, write_tune_report
from tuning.tune_trials import read_trials

SPACE: dict[str, list] = {"tokens": [1024, 2048, 4096], "amp_dtype": ["bf16", "none"]}
SETTINGS = {
    "tokens": 2048,
    "batch_size": None,
    "num_workers": 1,
    "prefetch": 4,
    "amp_dtype": "bf16",
    "gradient_checkpointing": False,
    "compile": False,
    "stage": 2,
    "workers": 1,
}


def record(number: int, status: str = "ok", speed: float | None = 100.0, reason: str = "", **settings: Any) -> dict:
    """A line of trials.jsonl."""
    measurement = {
        "status": status,
        "reason": reason,
        "tokens_per_s": speed,
        "windows": [],
        "peak_memory_bytes": 500 * 2**20 if speed else None,
        "total_memory_bytes": 1000 * 2**20 if speed else None,
        "shares": {"data_wait": 0.3, "forward": 0.2, "backward": 0.4, "optimizer": 0.05, "communication": 0.0},
        "seconds": 3.0,
    }
    return {"trial": number, "settings": SETTINGS | settings, "measurement": measurement, "phase": "sample", "time": 1}


RECORDS = [
    record(0, speed=8000.0),
    record(1, speed=12_000.0, tokens=4096),
    record(2, "out_of_memory", None, "memory ran out: the peak passed <1 GiB>", tokens=4096, amp_dtype="none"),
    record(3, "crash", None, "worker 0 was killed by signal 9", tokens=1024),
    record(4, "timeout", None, "no answer for 300 s", amp_dtype="none"),
    record(5, "nan", None, "loss was not finite in step 1", tokens=1024, amp_dtype="none"),
    record(6, "pruned", 3000.0, "too slow to win", tokens=4096, num_workers=0),
    record(7, "pruned", None, "needs at least the memory of one that did not fit", tokens=8192, amp_dtype="none"),
]


class Page(HTMLParser):
    """What a reader sees: text, tags that were left open, addresses of whatever is loaded."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.loaded: list[str] = []
        self.rows = 0
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loaded += [value or "" for name, value in attrs if name in ("src", "href")]
        self.rows += tag == "tr"
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of a search whose experiment is that of trial 0."""
    config = {"batch": {"tokens": 2048, "global_tokens": 8192}, "data": {"num_workers": 1}}
    tune = TuneConfig.model_validate({"memory_margin": 0.11})
    (tmp_path / "config.yaml").write_text(dump_config(Config.model_validate(config)), encoding="utf-8")
    (tmp_path / "tune.yaml").write_text(dump_config(tune), encoding="utf-8")
    return tmp_path


def test_the_page_needs_nothing_else_and_shows_real_pictures(folder: Path):
    write_tune_report(RECORDS, folder, SPACE)
    written = (folder / HTML_FILE).read_text(encoding="utf-8")
    page = Page(written)
    assert page.open == []
    assert len(page.loaded) == 5
    for source in page.loaded:
        kind, _, data = source.partition(",")
        assert kind == "data:image/png;base64"
        assert base64.b64decode(data, validate=True).startswith(b"\x89PNG")
    assert not re.search(r"https?://|@import|url\(", written)
    assert image.imread(folder / PNG_FILE).shape[1] > 1000
    names = {path.name for path in folder.iterdir()}
    assert names == {"config.yaml", "tune.yaml", HTML_FILE, PNG_FILE}


def test_every_trial_is_listed_with_what_became_of_it(folder: Path):
    write_tune_report(RECORDS, folder, SPACE)
    text = " ".join(Page((folder / HTML_FILE).read_text(encoding="utf-8")).text)
    for line in RECORDS:
        assert line["measurement"]["reason"] in text
    assert "2 measured, 1 stopped early, 1 out of memory, 1 crashed, 1 hung, 1 NaN, 1 ruled out." in text
    assert "12,000 tokens/s with token budget 4,096" in text
    assert "The loader limits: 30%" in text
    assert "11% of the memory free" in text


def test_the_best_is_compared_with_the_experiments_own_settings(folder: Path):
    write_tune_report(RECORDS, folder, SPACE)
    text = " ".join(Page((folder / HTML_FILE).read_text(encoding="utf-8")).text)
    assert "1.50× the experiment's own settings" in text
    assert "1.50× the median of what was measured" in text
    write_tune_report(RECORDS[1:], folder, SPACE)
    assert "experiment's own" not in (folder / HTML_FILE).read_text(encoding="utf-8")


def test_a_speed_whose_windows_differ_is_told_with_them(folder: Path):
    noisy, own = deepcopy(RECORDS[1]), deepcopy(RECORDS[0])
    noisy["measurement"]["windows"], own["measurement"]["windows"] = [11_000.0, 13_000.0], [2_790.0, 23_059.0]
    write_tune_report([own, noisy], folder, SPACE)
    text = " ".join(Page((folder / HTML_FILE).read_text(encoding="utf-8")).text)
    assert "12,000 tokens/s (windows 11,000 to 13,000) with token budget 4,096" in text
    assert "the fastest that fits (windows 11,000 to 13,000)" in text
    assert "the experiment's own settings (windows 2,790 to 23,059)" in text


def test_a_stage_left_to_deepspeeds_file_is_that_of_the_file(folder: Path):
    other = record(0, speed=5000.0, stage=1)
    trials = read_trials([other, *RECORDS])
    found = own_trial(trials, load_config(folder / "config.yaml"))
    assert found is trials[1]


@pytest.mark.parametrize("records", [[], RECORDS[2:4]], ids=["no trial yet", "failed ones alone"])
def test_a_search_that_found_nothing_is_reported(tmp_path: Path, records: list[dict]):
    write_tune_report(records, tmp_path, SPACE)
    assert "no configuration was found that fits" in (tmp_path / HTML_FILE).read_text(encoding="utf-8")


def test_records_that_went_through_json_are_reported_alike(folder: Path):
    write_tune_report(RECORDS, folder, SPACE)
    before = (folder / HTML_FILE).read_bytes()
    write_tune_report(json.loads(json.dumps(RECORDS)), folder, SPACE)
    assert (folder / HTML_FILE).read_bytes() == before
