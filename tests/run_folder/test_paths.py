from pathlib import Path

from run_folder.paths import RunFolder


def test_a_new_start_forgets_what_was_asked_of_the_one_before_and_what_ray_kept_of_it(tmp_path: Path):
    run = RunFolder(tmp_path, "run")
    run.path.mkdir()
    run.request_stop()
    run.ray_snapshot.write_text('{"ray_version": "2.6')  # as a killed run leaves it
    run.clear_requests()
    assert not run.end_requested() and not run.ray_snapshot.exists()
