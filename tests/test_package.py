"""The wheel has one package with its data files, and works next to a user's modules named like its subpackages."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.slurm import SlurmJob

pytestmark = pytest.mark.slow

OWN = ("common", "model", "tools", "dataset", "tests")
"""Names of a user's modules; they must not be imported in place of Esmeray's."""
READ = (".py", ".pyi", ".typed", ".yaml", ".cpp", ".html", ".js", ".css")
NOT_CODE = (".*", "runs", "stores", "wandb", "results", "build", "*.egg-info", "__pycache__")
EMBED_READ_AND_PLAN = """
import sys
sys.modules.update(dict.fromkeys(("ray", "deepspeed", "wandb", "optuna", "fastapi", "uvicorn")))  # as if not installed
import esmeray
from esmeray.tools.__main__ import main

size = "--embed.models esm2_t6_8M --embed.random_weights true --embed.device cpu"
main(f"embed run {size} --embed.input a.fasta --embed.output v".split())
print(esmeray.read_embeddings("v")["b"].shape)
main("train --config esm2ae --dry_run --ray.address local".split())
"""
ON_A_CLUSTER = """
import ray
import esmeray
from esmeray.cluster.connection import connected, worker_environment
from esmeray.cluster.section import RaySection

def locations():
    import sys
    from pathlib import Path
    import esmeray.common.errors
    return esmeray.__path__, sorted(path.name for path in Path(esmeray.common.errors.__file__).parents[2].iterdir())

assert "site-packages/esmeray" in esmeray.__path__[0], esmeray.__path__
with connected(RaySection()):
    task = ray.remote(locations).options(num_cpus=1, runtime_env=worker_environment() | {"env_vars": {}})
    for path, siblings in ray.get([task.remote(), task.remote()]):
        print("py_modules" in path[0], len(path), siblings)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    tree = folder / "tree"  # setuptools builds next to what it packs
    shutil.copytree(REPOSITORY, tree, symlinks=True, ignore=shutil.ignore_patterns(*NOT_CODE))
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder)]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, str(tree)], check=True, capture_output=True)
    (file,) = folder.glob("*.whl")
    return file


@pytest.fixture
def installed(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder, the current one, and next to it the wheel's package as pip unpacks it."""
    packages, folder = tmp_path / "site-packages", tmp_path / "own"
    with zipfile.ZipFile(wheel) as file:
        file.extractall(packages)
    folder.mkdir()
    for name in OWN:
        (folder / f"{name}.py").write_text(f"raise RuntimeError('the user\\'s {name} was imported')\n")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", str(packages))
    return folder


def run(program: str, **environment: str) -> str:
    return subprocess.check_output([sys.executable, "-c", program], env={**os.environ, **environment}, text=True)


def test_the_wheel_has_the_package_and_its_data_files(wheel: Path):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.partition("/")[0] for name in names} == {"esmeray", f"esmeray-{wheel.name.split('-')[1]}.dist-info"}
    read = {path for path in (REPOSITORY / "esmeray").rglob("*") if path.suffix in READ}
    assert {str(path.relative_to(REPOSITORY)) for path in read} <= {*names}


def test_commands_run_next_to_a_users_modules_of_the_same_names(installed: Path):
    (installed / "a.fasta").write_text(">a\nMKTAYIAKQR\n>b\nMSILVTRPSP\n")
    shown = run(EMBED_READ_AND_PLAN)
    assert "\n(320,)\n" in shown and "parameters" in shown


def test_the_package_travels_to_other_machines_and_nothing_else(installed: Path, slurm_job: SlurmJob):
    packages = {"PYTHONPATH": os.environ["PYTHONPATH"]}
    lines = run(ON_A_CLUSTER, **slurm_job.environment | packages).splitlines()
    assert lines == 2 * ["True 1 ['esmeray']"]
