import numpy as np
from matplotlib import image

from monitoring.watch import curves
from monitoring.watch.curves import draw_curves
from training.tasks.registry import metric_labels


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
    draw_curves(records(), tmp_path / "curves.png", "a run", metric_labels())
    pixels = image.imread(tmp_path / "curves.png")
    assert pixels.shape[0] > 500
    assert pixels.shape[1] > 1000
    assert len(np.unique(pixels[..., 0])) > 20
    assert list(tmp_path.iterdir()) == [tmp_path / "curves.png"]
    draw_curves([], tmp_path / "empty.png", "nothing yet", metric_labels())


def validation_of(monkeypatch, validations: list[dict]):
    """The panel of the metrics, as it is drawn."""
    figures = []
    monkeypatch.setattr(curves, "save", lambda figure, path: figures.append(figure))
    draw_curves(
        [{"kind": "validation", "loss": 1.0, **record} for record in validations],
        "unused.png",
        "a run",
        metric_labels(),
    )
    return figures[0].axes[1]


def test_r2_below_the_axis_is_marked_and_its_lowest_value_said(monkeypatch):
    axes = validation_of(monkeypatch, [{"step": step, "feature_r2": value} for step, value in ((0, -28.5), (10, 0.5))])
    assert axes.get_ylim()[0] == -1.0
    marks = next(line for line in axes.lines if line.get_label() == "below -1, down to -28.5")
    assert (list(marks.get_xdata()), list(marks.get_ydata())) == ([0], [-1.0])
    assert len(validation_of(monkeypatch, [{"step": 0, "feature_r2": -0.9}]).lines) == 1


def test_curves_of_a_classifier_have_macro_f1_beside_the_accuracy(monkeypatch):
    figures = {"accuracy": 0.9, "f1_macro": 0.5, "f1_micro": 0.9}
    labels = [line.get_label() for line in validation_of(monkeypatch, [{"step": 0, "mcc": 0.4, **figures}]).lines]
    assert labels == ["accuracy (last 0.900)", "macro F1 (last 0.500)", "MCC (last 0.400)"]
    of_labels = validation_of(monkeypatch, [{"step": 0, **figures}]).lines
    assert [line.get_label() for line in of_labels][1:] == ["macro F1 (last 0.500)", "micro F1 (last 0.900)"]
