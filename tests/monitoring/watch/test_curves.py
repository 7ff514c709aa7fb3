import numpy as np
import pytest

from esmeray.monitoring.watch.curves import draw_curves
from esmeray.tasks.registry import metric_labels

pytestmark = pytest.mark.slow


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


def test_each_panel_shows_its_series_and_resumes_and_skipped_steps(saved_figures, tmp_path):
    draw_curves(records(), tmp_path / "curves.png", "a run", metric_labels())
    assert list(tmp_path.iterdir()) == [tmp_path / "curves.png"]
    panels = saved_figures[0].axes
    by_label = {line.get_label(): line.get_xydata() for axes in panels for line in axes.lines}
    steps = np.arange(1, 51)
    np.testing.assert_allclose(by_label["training"], np.stack([steps, np.where(steps == 7, np.nan, 3 / steps)], 1))
    np.testing.assert_allclose(by_label["validation"], [[step, 1.0] for step in range(0, 51, 10)])
    np.testing.assert_allclose(by_label["skipped (1)"][:, 0], [7])
    curves = ["recovery, share of residues right (last 1.000)", "feature R², variance explained (last 0.500)"]
    assert by_label.keys() >= {*curves, "median 10.0k"}
    assert all(any(list(line.get_xdata()) == [20, 20] for line in axes.lines) for axes in panels)
    draw_curves([], tmp_path / "empty.png", "nothing yet", metric_labels())


def test_a_rising_validation_loss_is_not_cut_off(saved_figures, tmp_path):
    train = [{"kind": "train", "step": step, "loss": 3 / step} for step in range(1, 1001)]
    rising = [{"kind": "validation", "step": 200 * n, "loss": n, "unconditional_loss": n + 1} for n in range(1, 6)]
    rising[0]["feature_r2"] = -28.5
    draw_curves([*train, *rising], tmp_path / "curves.png", "a run", metric_labels())
    losses, metrics, *_ = saved_figures[0].axes
    assert losses.get_ylim()[1] > 5.9 and metrics.get_ylim()[0] == -1.0
    marks = next(line for line in metrics.lines if line.get_label() == "below -1, down to -28.5")
    assert (list(marks.get_xdata()), list(marks.get_ydata())) == ([200], [-1.0])
