"""Users without a home folder or an entry in passwd still get private folders."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from esmeray.common import own_folders
from esmeray.common.errors import ConfigError, ResourceError, expanded
from esmeray.common.own_folders import cache_folder, own_folder
from tests.conftest import REPOSITORY

STRANGER = ["unshare", "--user", "--map-user=4711", "--map-group=4711"]
"""Command that runs a program as a user without an entry in passwd, as in containers; needs no root."""
PROGRAM = """
import json
import esmeray
from esmeray.cluster.private_folder import ray_folder
from esmeray.common.own_folders import cache_folder
from pathlib import Path
import ray.train  # looks for the home

print(json.dumps([str(ray_folder()), str(cache_folder("kernels")), str(Path.home())]))
"""


@pytest.mark.slow
@pytest.mark.skipif(
    subprocess.run([*STRANGER, "true"], check=False).returncode != 0, reason="the kernel allows no user namespaces"
)
@pytest.mark.parametrize("home", [None, "/proc"], ids=["no home", "one that is read-only"])
def test_a_user_without_passwd_entry_has_caches_in_the_temporary_folder(tmp_path: Path, home: str | None):
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(REPOSITORY),
        "TMPDIR": str(tmp_path),
        "XDG_RUNTIME_DIR": "/run/user/4711",  # of a login session, which this user does not have
    }
    environment |= {} if home is None else {"HOME": home}
    # Import Ray only once, as it takes longest.
    program = PROGRAM if home is None else PROGRAM.replace("import ray.train", "")
    output = subprocess.check_output([*STRANGER, sys.executable, "-c", program], env=environment, text=True)
    ray, kernels, found = json.loads(output)
    own = tmp_path / "esmeray-4711"
    # An explicitly set home stays unchanged.
    assert found == ("/proc" if home == "/proc" else str(own)) and own.stat().st_mode & 0o777 == 0o700
    assert ray.endswith("esmeray-4711/ray") and kernels.startswith(f"{own}/") and Path(kernels).is_dir()


def test_a_cache_that_cannot_be_written_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(own_folders.tempfile, "tempdir", str(tmp_path))
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    folder = cache_folder("kernels")
    assert folder == tmp_path / f"esmeray-{os.geteuid()}" / "kernels" == cache_folder("kernels")
    folder.parent.chmod(0o750)
    with pytest.raises(
        ResourceError,
        match=r"another user owns it or has access to it; remove it, or set TMPDIR \(for Ray: RAY_TMPDIR\) to another",
    ):
        own_folder(tmp_path)


def test_a_missing_home_is_refused_in_one_line():
    with pytest.raises(ConfigError, match=r"^~no-such-user/runs: unknown user"):
        expanded("~no-such-user/runs")
