import numpy as np
import pytest
from matplotlib.text import Text
from sklearn import metrics

from esmeray.dataset.targets import IGNORED_TARGET
from esmeray.inference.classify.plots import draw_confusion, draw_predictions, draw_reliability, draw_roc_pr

pytestmark = pytest.mark.slow


def test_no_text_of_a_plot_is_clipped_whatever_the_class_names(saved_figures, tmp_path):
    names = ("_hidden", r"cost_$x^$_{" + "a\nb" + "long" * 30, *["request_refund_not_showing_up"] * 28)
    for classes in (2, 30):
        draw_confusion(tmp_path / f"{classes}.png", np.eye(classes, dtype=int), names[:classes])
    small, large = saved_figures
    for text in small.findobj(Text):
        left, bottom, right, top = text.get_window_extent().extents
        assert left >= 0 and bottom >= 0 and right <= small.bbox.x1 and top <= small.bbox.y1, text.get_text()
    (cells,) = large.axes[0].images
    assert cells.get_window_extent().width / 30 > 12  # pixels a class; at 7 points a letter is 12 high


def test_curves_of_frequent_classes_with_both_outcomes_are_drawn(saved_figures, tmp_path):
    random = np.random.default_rng(0)
    targets = random.integers(12, size=300)
    scores = random.random((300, 12)) + np.eye(12)[targets] / 2
    names = [f"class_{number}" for number in range(12)]
    draw_roc_pr(tmp_path / "ranking.png", scores, targets, names)
    frequent = np.argsort(-np.bincount(targets), kind="stable")[:8]
    lines = saved_figures[0].axes[0].lines
    assert [line.get_label().split()[0] for line in lines] == [*(names[index] for index in frequent), "chance"]
    targets[:] = 0
    draw_roc_pr(tmp_path / "none.png", scores, targets, names)
    draw_reliability(tmp_path / "none.png", scores[:0], targets[:0])
    assert [line.get_label() for line in saved_figures[1].axes[0].lines] == ["chance (AUC = 0.50)"]


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


def test_curves_and_points_are_those_of_the_predictions(saved_figures, tmp_path):
    scores, targets = np.array([0.1, 0.9, 0.6, 0.4, 0.8, 0.3]), np.array([0, 1, 1, 1, 0, 0])
    both = np.stack([1 - scores, scores], axis=1)
    with_unknown = np.vstack([both, [0.2, 0.8]]), np.append(targets, IGNORED_TARGET)
    draw_roc_pr(tmp_path / "ranking.png", *with_unknown, ("no", "yes"))
    draw_reliability(tmp_path / "reliability.png", *with_unknown)
    measured = np.array([[1.0, 5.0], [2.0, np.nan], [3.0, 7.0]])
    draw_predictions(tmp_path / "predictions.png", measured * 10, measured, ("tm", "ph"))
    (roc, precision), (above,), (tm, ph) = (figure.axes for figure in saved_figures)
    areas = metrics.roc_auc_score(targets, scores), metrics.average_precision_score(targets, scores)
    assert [line.get_label() for line in roc.lines] == [f"yes (AUC = {areas[0]:.2f})", "chance (AUC = 0.50)"]
    assert [line.get_label() for line in precision.lines] == [f"yes (AP = {areas[1]:.2f})"]
    assert roc.get_xlabel() == "false positive rate" and roc.get_ylabel() == precision.get_xlabel() == "recall"
    observed = next(line for line in above.lines if line.get_label() == "observed")
    right = {0.6: 0.5, 0.7: 1.0, 0.8: 0.0, 0.9: 1.0}  # of the likelier class; 0.6 twice, right once
    np.testing.assert_allclose(observed.get_xydata(), [*right.items()])
    np.testing.assert_allclose(tm.collections[0].get_offsets(), [[10, 1], [20, 2], [30, 3]])
    np.testing.assert_allclose(ph.collections[0].get_offsets(), [[50, 5], [70, 7]])
    assert (tm.get_xlabel(), tm.get_ylabel()) == ("predicted", "measured")
