import numpy as np
from matplotlib import image

from monitoring.curves import draw_curves, smooth


def records(steps: int = 50) -> list[dict]:
    train = [
        {"kind": "train", "step": i, "loss": 3 / i if i != 7 else None, "tokens_per_s": 1e4, "learning_rate": 1e-3}
        for i in range(1, steps + 1)
    ]
    validation = [
        {"kind": "validation", "step": i, "loss": 1.0, "residue_recovery": i / steps, "feature_r2": 0.5}
        for i in range(0, steps + 1, 10)
    ]
    events = [{"kind": "event", "step": 20, "event": "resumed"}, {"kind": "event", "step": 7, "event": "nonfinite"}]
    return train + validation + events


def test_picture_is_drawn_and_shows_something(tmp_path):
    draw_curves(records(), tmp_path / "curves.png", "a run")
    pixels = image.imread(tmp_path / "curves.png")
    assert pixels.shape[0] > 500
    assert pixels.shape[1] > 1000
    assert np.unique(pixels.reshape(-1, pixels.shape[-1]), axis=0).shape[0] > 20
    assert list(tmp_path.iterdir()) == [tmp_path / "curves.png"]


def test_run_that_has_just_begun_can_be_drawn(tmp_path):
    draw_curves([], tmp_path / "empty.png", "nothing yet")
    draw_curves(records(1), tmp_path / "one.png", "one step")
    assert (tmp_path / "empty.png").exists()
    assert (tmp_path / "one.png").exists()


def test_smoothing_is_the_mean_of_the_finite_points_before():
    values = np.array([1.0, 2.0, np.nan, 4.0])
    np.testing.assert_allclose(smooth(values, 2), [1.0, 1.5, 2.0, 4.0])
    np.testing.assert_allclose(smooth(values, 1)[[0, 1, 3]], [1.0, 2.0, 4.0])
