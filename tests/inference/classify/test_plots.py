import numpy as np
import pytest

from esmeray.inference.classify.plots import draw_confusion, draw_predictions

pytestmark = pytest.mark.slow


def test_confusion_cells_are_at_their_true_and_predicted_class(saved_figures, tmp_path):
    names, counts = ("in", "out", "wall"), np.array([[5, 2, 0], [0, 7, 1], [3, 0, 9]])
    draw_confusion(tmp_path / "confusion.png", counts, names)
    (axes,) = saved_figures[0].axes
    columns, rows = ([tick.get_text() for tick in ticks] for ticks in (axes.get_xticklabels(), axes.get_yticklabels()))
    cells = {(rows[round(text.get_position()[1])], columns[round(text.get_position()[0])]): text for text in axes.texts}
    wanted = {(names[truth], names[other]): f"{count or ''}" for (truth, other), count in np.ndenumerate(counts)}
    assert {classes: text.get_text() for classes, text in cells.items()} == wanted
    assert axes.get_ylabel() == "true class" and axes.get_xlabel().startswith("predicted")
    np.testing.assert_allclose(axes.images[0].get_array(), counts / counts.sum(axis=1, keepdims=True))
    assert saved_figures[0].get_suptitle() == "21 of 27 correct (77.8%)"


def test_points_are_measured_against_predicted_numbers(saved_figures, tmp_path):
    measured = np.array([[1.0, 5.0], [2.0, np.nan], [3.0, 7.0]])
    draw_predictions(tmp_path / "predictions.png", measured * 10, measured, ("tm", "ph"))
    tm, ph = saved_figures[0].axes
    np.testing.assert_allclose(tm.collections[0].get_offsets(), [[10, 1], [20, 2], [30, 3]])
    np.testing.assert_allclose(ph.collections[0].get_offsets(), [[50, 5], [70, 7]])
    assert (tm.get_xlabel(), tm.get_ylabel()) == ("predicted", "measured")
