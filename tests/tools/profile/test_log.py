"""``esmeray profile log`` writes a plot and prints a diagnosis, and never overwrites the log."""

from tests.monitoring import gpu_traces


def test_summary_is_printed_and_drawn_with_what_to_do(command, tmp_path):
    log = gpu_traces.thermal().write(tmp_path / "log.csv")
    outcome = command.done("profile", "log", log)
    assert "% while busy, idle " in outcome.out
    assert "  heat: " in outcome.out and "to do: " in outcome.out
    assert (tmp_path / "log.png").exists()
    before = log.read_bytes()
    command.refused(2, "is the log itself", "profile", "log", log, "--profile.output", log)
    assert log.read_bytes() == before
