import gzip
import json
import re

import pytest

from benchmarks.public import script
from benchmarks.public.benchmark import Metric, PublicBenchmark, Value, Work
from benchmarks.public.classifiers import write_residues
from esmeray.common.errors import ConfigError, DataError

pytestmark = pytest.mark.slow

MEASURED = []


def share_of_alanine(work: Work) -> dict[str, Value]:
    MEASURED.append(work.seed)
    source = "missing.fasta" if work.seed == 9 else "proteins.fasta"
    work.run(f"data convert --data.source DATA/{source} --convert.store FOLDER/store")
    return {"share": Value(value=0.5 + work.seed / 10, interval=(0.4, 0.9)), "guess": Value(value=0.05)}


BENCHMARK = PublicBenchmark(
    name="toy_shares",
    title="Shares of alanine",
    about={"data": "two proteins (CC0)", "split": "none", "plain baseline": "a twentieth"},
    metrics=(Metric("share", "share", "guess", {"others": 0.75}),),
    measure=share_of_alanine,
)


def test_a_failed_benchmark_resumes_and_its_page_compares_the_values(tmp_path, monkeypatch):
    monkeypatch.setattr(script, "BENCHMARKS", (BENCHMARK,))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "proteins.fasta").write_text(">p1\nMAAA\n>p2\nMKV\n")
    places = {"data": "data", "folder": "runs", "output": "public.md"}
    folders = [word for name, place in places.items() for word in (f"--{name}", str(tmp_path / place))]
    with pytest.raises(ConfigError, match="no benchmark is called 'toy'"):
        script.main([*folders, "toy"])
    with pytest.raises(DataError, match=r"esmeray data convert .*missing.fasta.*: ended with code 3; its output is in"):
        script.main([*folders, "--seeds", "0", "9", "1"])
    assert "| 1 |" in (tmp_path / "public.md").read_text(), "the page has what was measured"
    assert script.main([*folders, "--seeds", "0", "1"]) == 0
    assert MEASURED == [0, 9, 1], "a seed is measured once"
    values = tmp_path / "public" / "toy_shares" / "1.json"
    assert json.loads(values.read_text())["values"]["share"]["value"] == 0.6
    page = (tmp_path / "public.md").read_text()
    assert "| **0.550** (0.500 to 0.600) | 2 | 0.400 to 0.900 | 0.050 | others 0.75 |" in page
    assert "    esmeray data convert --data.source DATA/proteins.fasta --convert.store FOLDER/store" in page
    assert str(tmp_path) not in page and "random weights" in page
    assert "- plain baseline: a twentieth" in page
    # Each link in the table leads to a section.
    assert set(re.findall(r"\]\(#([^)]+)\)", page)) == set(re.findall(r'<a id="([^"]+)">', page)) == {"toy_shares"}


def test_residues_that_were_not_resolved_have_no_structure(tmp_path):
    with gzip.open(tmp_path / "table.csv.gz", "wt") as file:
        file.write("id,sequence,structure,resolved,split\na,MKV,HEC,101,train\n")
    write_residues(tmp_path / "table.csv.gz", tmp_path / "out.csv")
    assert (tmp_path / "out.csv").read_text().split() == ["id,sequence,structure,split", "a,MKV,H.C,train"]
