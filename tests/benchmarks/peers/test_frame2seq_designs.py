"""Frame2seq, opened without the packages that its program needs for files."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.programs.processes import call
from esmeray.dataset.section import DataSection
from esmeray.dataset.structures.conversion import convert_structures


@pytest.mark.nightly
@pytest.mark.skipif(find_spec("frame2seq") is None, reason="make bench installs frame2seq")
def test_frame2seq_recovers_a_test_chain_as_its_networks_do(tmp_path: Path, shared_data: Path):
    chain = shared_data / "structures" / "test" / "1CGI_l_u__.pdb.gz"
    convert_structures([str(chain)], tmp_path / "store", DataSection())
    metrics = call("benchmarks.peers.frame2seq_designs:evaluated", store=str(tmp_path / "store"))
    # Computed with the coordinates of the file, by a script that used the wheel alone. The store's are in fp16.
    assert metrics["median recovery"]["value"] == pytest.approx(0.607, abs=0.02)
    assert metrics["perplexity"]["value"] == pytest.approx(3.403, rel=0.02)
