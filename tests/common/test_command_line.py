import logging
import subprocess
import sys
import warnings
from functools import partial

from esmeray.common import errors
from esmeray.common.command_line import logged_to, run
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


def test_a_reader_that_has_seen_enough_is_no_error():
    script = (
        "import sys; from esmeray.common.command_line import run;"
        "sys.exit(run(lambda _: [print('x' * 99) for _ in range(9999)] and 0))"
    )
    command = f'{sys.executable} -c "{script}" | head -1'
    done = subprocess.run(command, shell=True, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.stdout.startswith("xxx")
    assert done.stderr == ""


def test_what_libraries_log_is_in_the_file_and_not_on_the_terminal(tmp_path, capsys):
    library = logging.getLogger("DeepSpeed")
    handler = logging.StreamHandler()  # as it makes one of its own
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
