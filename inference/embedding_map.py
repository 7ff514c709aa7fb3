"""Maps of proteins: a PNG, and a page of HTML that needs nothing else.

In: a table of points with columns id, length, label, x and y, a title, the names of both axes and of the label.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.lines import Line2D

from common.figure_style import BLUE, GREEN, GRID, INK, MAGENTA, ORANGE, RED, new_figure, save, style

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
"""A box that stars the points whose ids have its text: the last trace of the page."""


def draw(path: Path, points: pd.DataFrame, title: str, x: str, y: str, label: str) -> None:
    """Write the PNG."""
    figure = new_figure(9.5, 7, title)
    axes = figure.subplots()
    style(axes)
    axes.grid(color=GRID, linewidth=0.8)
    axes.set(xlabel=x, ylabel=y)
    handles = []
    for name, some, colour in _groups(points, label):
        look = {"color": colour} if isinstance(colour, str) else {"c": colour}
        drawn = axes.scatter(some["x"], some["y"], s=np.clip(20_000 / len(points), 5, 30), linewidths=0, **look)
        if isinstance(colour, str):
            text = name.replace("$", r"\$")
            handles.append(Line2D([], [], color=colour, marker="o", linestyle="", label=text))
        else:
            figure.colorbar(drawn, label=name.replace("$", r"\$"), shrink=0.6).outline.set_visible(False)
    figure.legend(handles=handles, loc="outside right upper", frameon=False, fontsize=9, labelcolor=INK)
    save(figure, path)


def write_page(path: Path, points: pd.DataFrame, title: str, x: str, y: str, label: str) -> None:
    """Write the page."""
    import plotly.graph_objects as go

    layout = {"template": "plotly_white", "title": title, "xaxis_title": x, "yaxis_title": y}
    figure = go.Figure(layout=layout)
    for name, some, colour in _groups(points, label):
        is_class = isinstance(colour, str)
        scale = {} if is_class else {"colorscale": "Viridis", "colorbar": {"title": name, "len": 0.8, "y": 0.4}}
        figure.add_scattergl(
            x=some["x"].round(4).tolist(),
            y=some["y"].round(4).tolist(),
            text=some["id"].tolist(),
            customdata=some[["length", "label"]].astype(object).fillna("no label"),
            hovertemplate=f"%{{text}}<br>%{{customdata[0]}} residues<br>{label}: %{{customdata[1]}}<extra></extra>",
            mode="markers",
            marker={"color": colour, "size": 6, **scale},
            name=name,
            showlegend=is_class,
        )
    stars = {"symbol": "star", "color": "#ffe600", "size": 16, "line": {"color": INK, "width": 1.5}}
    figure.add_scattergl(x=[], y=[], mode="markers", marker=stars, hoverinfo="skip", showlegend=False)
    page = figure.to_html(post_script=SEARCH, div_id="plot", default_height="88vh", config={"displaylogo": False})
    path.write_text(page, encoding="utf-8")


def _groups(points: pd.DataFrame, label: str) -> Iterator[tuple[str, pd.DataFrame, str | pd.Series]]:
    """Name, points and colour of each class, as they are drawn one over the other; of numbers the colours are these."""
    labels = points["label"]
    if labels.isna().any():
        yield f"no label ({labels.isna().sum():,})", points[labels.isna()], "#c9cdd3"
    if pd.api.types.is_numeric_dtype(labels) and not pd.api.types.is_bool_dtype(labels):
        yield label, points[labels.notna()], labels.dropna()
        return
    largest = labels.value_counts().index[: len(COLOURS)]
    if (other := labels.notna() & ~labels.isin(largest)).any():
        yield f"other ({other.sum():,})", points[other], INK
    for name, colour in zip(largest, COLOURS, strict=False):
        yield f"{name} ({(labels == name).sum():,})", points[labels == name], colour
