import logging
import signal
import subprocess
import sys
import warnings
from functools import partial

import pytest

from esmeray.common import errors
from esmeray.common.command_line import CLUSTER_SIGNALS, kept_from_children, logged_to, run
from tests.conftest import REPOSITORY

EXIT_CODES = {
    errors.EsmerayError: 1,
    errors.ConfigError: 2,
    errors.DataError: 3,
    errors.ResourceError: 4,
    errors.DivergenceError: 5,
    errors.CheckpointError: 6,
}


def test_a_refusal_and_an_interrupt_are_one_line_and_their_exit_code(capsys):
    def main(kind: type[BaseException], argv: list[str]) -> int:
        raise kind(f"{argv[0]}: wrong\nin two lines")

    for kind, code in EXIT_CODES.items():
        assert run(partial(main, kind), ["file"]) == code
        assert capsys.readouterr() == ("", "error: file: wrong in two lines\n")
    assert run(partial(main, KeyboardInterrupt), ["file"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def shell(body: str, redirection: str) -> subprocess.CompletedProcess[str]:
    """Run a command that prints and then writes the file ``done``; a shell redirects its streams."""
    program = f"""
import os, signal, sys
from esmeray.common.command_line import end_process

def main(argv):
    print("x" * 9999, flush=True)
    {body}
    open("done", "w").write("done")

end_process(main)
"""
    command = ["bash", "-c", f'"$0" -c "$1" {redirection}', sys.executable, program]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


@pytest.fixture
def in_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-", "2>/dev/full", "| true; exit ${PIPESTATUS[0]}"])
def test_a_command_finishes_if_its_output_streams_are_closed(in_folder, closed):
    # Output of a library or child process must not end up in a file that was opened later.
    done = shell('open("data", "w"); os.system("echo 2>&-"); print("to stderr", file=sys.stderr, flush=True)', closed)
    assert done.returncode == 0 and done.stderr in ("", "to stderr\n")
    assert [(in_folder / name).read_text() for name in ("data", "done")] == ["", "done"]


def test_full_stdout_is_one_line_and_exit_code_4_after_the_work(in_folder):
    done = shell("", ">/dev/full")
    assert (done.returncode, done.stderr) == (4, "error: stdout can't be written: No space left on device\n")
    assert (in_folder / "done").exists()


def test_names_of_any_file_can_be_opened_and_printed_in_an_ascii_locale(in_folder, monkeypatch):
    for name, value in {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}.items():
        monkeypatch.setenv(name, value)
    done = shell(r"""open("\u0439", "w").close(); print("\u0439", os.fsdecode(b"\xff"))""", "")
    assert (done.returncode, done.stderr) == (0, "")
    assert (in_folder / "\u0439").exists() and done.stdout.splitlines()[1] == "\u0439 \\udcff"
    done = shell(r"""os.fsdecode(b"\xff").encode()""", "")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1


def test_signal_of_a_cluster_ends_a_command_once_and_is_its_exit_code(in_folder):
    body = """
    try:
        os.kill(os.getpid(), signal.SIGUSR1)
    finally:
        os.kill(os.getpid(), signal.SIGUSR1)
        open("cleaned", "w").close()"""
    assert shell(body, "").returncode == 128 + signal.SIGUSR1
    assert (in_folder / "cleaned").exists() and not (in_folder / "done").exists()


def test_protected_processes_do_not_get_signals_of_clusters():
    with kept_from_children():
        child = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, []) & {*CLUSTER_SIGNALS}
    for signum in CLUSTER_SIGNALS:
        child.send_signal(signum)
    assert child.communicate(b"alive")[0] == b"alive"


def test_logs_of_libraries_go_to_the_file_and_not_to_the_terminal(tmp_path, capsys):
    library = logging.getLogger("DeepSpeed")
    handler = logging.StreamHandler()  # DeepSpeed adds its own handler
    library.addHandler(handler)
    library.propagate = False
    try:
        with logged_to(tmp_path / "log", "%(levelname)s %(message)s"):
            library.warning("no %s", "GPU")
            warnings.warn("deprecated", stacklevel=1)
            logging.getLogger("some.room").info("begun")
        assert capsys.readouterr() == ("", "")
        library.warning("later")
        assert "later" in capsys.readouterr().err, "beyond the block nothing is changed"
    finally:
        library.removeHandler(handler)
    logged = (tmp_path / "log").read_text()
    assert logged.startswith("WARNING no GPU\n") and logged.endswith("INFO begun\n")
    assert "UserWarning: deprecated" in logged and "later" not in logged
