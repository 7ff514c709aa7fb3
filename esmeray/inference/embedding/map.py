"""Maps of proteins as a PNG and a self-contained HTML page. Shape legend: P points."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.lines import Line2D
from numpy.typing import NDArray

from esmeray.common.figure_style import BLUE, GREEN, GRID, INK, MAGENTA, ORANGE, RED, picture, style

COLOURS = (BLUE, ORANGE, GREEN, RED, "#7b5aa6", "#4ab4c4", MAGENTA, "#8c564b", "#e7c21a", "#7fb93d", "#1f3d7a")
SEARCH = """
const plot = document.getElementById('{plot_id}'), last = plot.data.length - 1;
const box = document.createElement('input'), count = document.createElement('span');
Object.assign(box, {type: 'search', placeholder: 'part of an id'});
box.style = count.style = 'font: 14px sans-serif; margin: 8px';
plot.before(box, count);
document.body.style.margin = 0;
box.oninput = () => {
  const part = box.value.trim().toLowerCase(), x = [], y = [];
  if (part) plot.data.slice(0, last).forEach(trace => trace.text.forEach((id, n) => {
    if (id.toLowerCase().includes(part)) { x.push(trace.x[n]); y.push(trace.y[n]); }
  }));
  Plotly.restyle(plot, {x: [x], y: [y]}, [last]);
  count.textContent = part && x.length + ' found';
};"""
"""JavaScript of a search box that marks points with matching ids, using the last trace of the page."""


class Points(NamedTuple):
    """Points of a map.

    Attributes:
        ids: (P,) ids.
        lengths: (P,) residues.
        labels: (P,) numbers, NaN if missing, or names, empty if missing.
        xy: (P, 2) coordinates.
    """

    ids: NDArray
    lengths: NDArray[np.integer]
    labels: NDArray
    xy: NDArray[np.floating]

    @property
    def are_numbers(self) -> bool:
        """True if the labels are numbers."""
        return self.labels.dtype.kind != "U"

    @property
    def are_labelled(self) -> NDArray[np.bool_]:
        """(P,) true for points with a label."""
        return ~np.isnan(self.labels) if self.are_numbers else self.labels != ""


def draw(path: Path, points: Points, title: str, x: str, y: str, label: str) -> None:
    with picture(path, 9.5, 7, title) as figure:
        axes = figure.subplots()
        style(axes)
        axes.grid(color=GRID, linewidth=0.8)
        axes.set(xlabel=x, ylabel=y)
        handles = []
        for name, rows, colour in _groups(points, label):
            # Markers shrink with the number of points to reduce overlap, but stay visible.
            area = np.clip(20_000 / len(points.ids), 5, 30)
            drawn = axes.scatter(points.xy[rows, 0], points.xy[rows, 1], s=area, linewidths=0, c=colour)
            text = name.replace("$", r"\$")  # $ starts math in Matplotlib
            if isinstance(colour, str):
                handles.append(Line2D([], [], color=colour, marker="o", linestyle="", label=text))
            else:
                figure.colorbar(drawn, label=text, shrink=0.6).outline.set_visible(False)
        figure.legend(handles=handles, loc="outside right upper", frameon=False, fontsize=9, labelcolor=INK)


def write_page(path: Path, points: Points, title: str, x: str, y: str, label: str) -> None:
    import plotly.graph_objects as go  # imported here, because it takes a second and pages are rarely requested

    figure = go.Figure(layout={"template": "plotly_white", "title": title, "xaxis_title": x, "yaxis_title": y})
    shown_labels = np.where(points.are_labelled, points.labels.astype(object), "no label")
    for name, rows, colour in _groups(points, label):
        is_class = isinstance(colour, str)
        scale = {} if is_class else {"colorscale": "Viridis", "colorbar": {"title": name, "len": 0.8, "y": 0.4}}
        figure.add_scattergl(
            x=points.xy[rows, 0].round(4).tolist(),  # rounding is invisible, and makes the page smaller
            y=points.xy[rows, 1].round(4).tolist(),
            text=points.ids[rows].tolist(),
            customdata=list(zip(points.lengths[rows].tolist(), shown_labels[rows].tolist(), strict=True)),
            hovertemplate=f"%{{text}}<br>%{{customdata[0]}} residues<br>{label}: %{{customdata[1]}}<extra></extra>",
            mode="markers",
            marker={"color": colour, "size": 6, **scale},
            name=name,
            showlegend=is_class,
        )
    figure.add_scattergl(
        x=[],
        y=[],
        mode="markers",
        marker={"symbol": "star", "color": "#ffe600", "size": 16, "line": {"color": INK, "width": 1.5}},
        hoverinfo="skip",
        showlegend=False,
    )
    page = figure.to_html(post_script=SEARCH, div_id="plot", default_height="88vh", config={"displaylogo": False})
    path.write_text(page, encoding="utf-8")


def _groups(points: Points, label: str) -> Iterator[tuple[str, NDArray[np.bool_], str | NDArray]]:
    """Yield name, rows and colour of each class in drawing order. For numbers the colours are the values."""
    labels, labelled = points.labels, points.are_labelled
    if not labelled.all():
        yield f"no label ({(~labelled).sum():,})", ~labelled, "#c9cdd3"
    if points.are_numbers:
        yield label, labelled, labels[labelled]
        return
    counts = Counter(labels[labelled].tolist()).most_common()
    # At most as many classes as distinguishable colours. Rare classes are drawn first, below the others.
    largest, others = counts[: len(COLOURS)], counts[len(COLOURS) :]
    if others:
        yield f"other ({sum(count for _, count in others):,})", np.isin(labels, [name for name, _ in others]), INK
    for (name, count), colour in zip(largest, COLOURS, strict=False):
        yield f"{name} ({count:,})", labels == name, colour
