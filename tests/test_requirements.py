"""Lock files have hashes for every package, and ``make sbom`` lists all packages."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

TORCH = re.compile(r"^torch==(.*)$", re.MULTILINE)


def locked(name: str) -> dict[str, list[str]]:
    """Hashes per package; the keys are NAME==VERSION."""
    blocks = re.split(r"\n(?=[^ #])", (REPOSITORY / "requirements" / name).read_text())[1:]
    return {re.split(r"[ \\;]", block)[0]: re.findall(r"--hash=sha256:(\w{64})\b", block) for block in blocks}


@pytest.mark.parametrize("name", ["requirements.lock", "dev.lock", "bench.lock"])
def test_every_locked_package_has_hashes_and_torch_is_left_to_each_machine(name: str):
    packages = locked(name)
    assert len(packages) > 130 and all(packages.values())
    assert all("==" in package for package in packages)
    assert not [package for package in packages if re.match("torch==|nvidia-c|cuda-|triton", package)]


@pytest.mark.slow
def test_the_sbom_has_every_locked_package_with_its_hashes(tmp_path: Path):
    requirements = (REPOSITORY / "requirements.txt").read_text()
    variables = [f"BIN={Path(sys.executable).parent}", f"VENV={tmp_path}", f"SBOM={tmp_path / 'sbom.json'}"]
    for stamp in (".installed", ".installed-dev"):
        (tmp_path / stamp).touch()
    subprocess.run(["make", "sbom", *variables], cwd=REPOSITORY, check=True, capture_output=True)
    written = json.loads((tmp_path / "sbom.json").read_text())
    assert written["bomFormat"] == "CycloneDX" and written["metadata"]["component"]["name"] == "esmeray"
    components = {f"{part['name']}=={part['version']}": part for part in written["components"]}
    packages = locked("requirements.lock")
    assert components.keys() == packages.keys() | {f"torch=={TORCH.search(requirements)[1]}"}
    for package, hashes in packages.items():
        references = components[package]["externalReferences"]
        assert {value["content"] for reference in references for value in reference.get("hashes", [])} == set(hashes), (
            package
        )
