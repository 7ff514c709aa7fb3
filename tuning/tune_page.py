"""The pieces of a report as one HTML page: cards, tables that sort, pictures embedded, and how they look.

In: text and PNG bytes. Out: HTML with nothing to fetch: no script, font or picture from elsewhere. All text is escaped
here. In the dark, pictures are inverted and their hues turned back, so that colours keep their meaning.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from html import escape
from typing import NamedTuple

_STYLE = """
:root { color-scheme: light dark; --ground: #f5f6f8; --card: #ffffff; --ink: #22262d; --soft: #667080;
  --line: #e2e5ea; --accent: #2a6fbb; --best: #d62f6b; --good: #1b7f5f; --bad: #c0392b; --row: #f9fafb; }
@media (prefers-color-scheme: dark) { :root { --ground: #15181d; --card: #1e2228; --ink: #e4e7ec; --soft: #98a2b0;
  --line: #333942; --accent: #7fb2ea; --best: #ff7aa8; --good: #5fcfa5; --bad: #ff8a7a; --row: #232830; }
  figure img { filter: invert(0.885) hue-rotate(180deg); } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink); line-height: 1.5;
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 32px 20px 64px; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 6px; }
h2 { font-size: 1.15rem; margin: 36px 0 12px; }
p { margin: 0 0 10px; max-width: 78ch; }
ul { margin: 0 0 10px; padding-left: 20px; } li { margin: 3px 0; max-width: 78ch; }
code, pre { font: 13px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
pre { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 12px 14px;
  overflow-x: auto; }
.lead { font-size: 1.05rem; color: var(--soft); }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(165px, 1fr)); gap: 12px; margin: 22px 0 8px; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 14px 16px; }
.card b { display: block; font-size: 1.55rem; line-height: 1.2; font-weight: 650; font-variant-numeric: tabular-nums; }
.card span { color: var(--soft); font-size: 0.86rem; }
.card.first b { color: var(--best); }
.verdict { background: var(--card); border: 1px solid var(--line); border-left: 4px solid var(--accent);
  border-radius: 8px; padding: 14px 18px 8px; }
.verdict h3 { font-size: 0.95rem; margin: 12px 0 4px; } .verdict > p { font-weight: 600; }
.pictures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 460px), 1fr)); gap: 14px; }
.pictures .wide { grid-column: 1 / -1; }
figure { margin: 0; background: #fff; border: 1px solid var(--line); border-radius: 10px; padding: 8px; }
@media (prefers-color-scheme: dark) { figure { background: #1d1d1d; } }
figure img { display: block; width: 100%; height: auto; }
.scroll { overflow-x: auto; background: var(--card); border: 1px solid var(--line); border-radius: 10px; }
.scroll.broad { position: relative; left: 50%; width: min(100vw - 40px, 1700px); transform: translateX(-50%); }
.broad th { white-space: normal; vertical-align: bottom; } .broad th, .broad td { padding: 6px 8px; }
table { border-collapse: collapse; width: 100%; font-size: 0.88rem; font-variant-numeric: tabular-nums; }
th, td { padding: 7px 11px; text-align: left; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { color: var(--soft); font-weight: 600; cursor: pointer; user-select: none; position: sticky; top: 0; }
th[aria-sort=ascending]::after { content: " \\2191"; } th[aria-sort=descending]::after { content: " \\2193"; }
td.number, th.number { text-align: right; } td.long { white-space: normal; min-width: 220px; }
tbody tr:nth-child(even) { background: var(--row); } tbody tr:last-child td { border-bottom: 0; }
tr.best td { color: var(--best); font-weight: 600; } tr.bad td { color: var(--bad); }
tr.faint td { color: var(--soft); }
footer { margin-top: 40px; color: var(--soft); font-size: 0.85rem; }
"""

_SCRIPT = """
for (const head of document.querySelectorAll("th")) head.addEventListener("click", () => {
  const body = head.closest("table").tBodies[0], column = head.cellIndex;
  const down = head.getAttribute("aria-sort") === "ascending";
  for (const other of head.parentNode.cells) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", down ? "descending" : "ascending");
  const key = row => row.cells[column].dataset.key ?? row.cells[column].textContent;
  const rows = [...body.rows].sort((a, b) => {
    const x = key(a), y = key(b);
    if (x === "" || y === "") return (x === "") - (y === "");
    const order = isNaN(x) || isNaN(y) ? x.localeCompare(y) : x - y;
    return down ? -order : order;
  });
  body.append(...rows);
});
"""


class Cell(NamedTuple):
    """A cell of a table.

    Attributes:
        text: shown.
        number: that the column sorts by, and whether it stands to the right; None sorts by the text.
        is_long: whether the text may take several lines.
    """

    text: str
    number: float | None = None
    is_long: bool = False


class Row(NamedTuple):
    """A row of a table: its cells and how it looks: best, bad, faint or plain."""

    cells: Sequence[Cell]
    look: str = ""


def page(title: str, parts: Iterable[str]) -> str:
    """The whole page around its parts, which are HTML."""
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(title)}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(parts)
        + f"\n</main>\n<script>{_SCRIPT}</script>\n</body>\n</html>\n"
    )


def tag(name: str, text: str, look: str = "") -> str:
    """An element with text."""
    looks = f' class="{escape(look)}"' if look else ""
    return f"<{name}{looks}>{escape(text)}</{name}>"


def cards(figures: Iterable[tuple[str, str]]) -> str:
    """Large figures with what they are, the first one marked."""
    made = [
        f'<div class="card{" first" if not index else ""}"><b>{escape(figure)}</b><span>{escape(what)}</span></div>'
        for index, (figure, what) in enumerate(figures)
    ]
    return f'<div class="cards">{"".join(made)}</div>'


def bullets(items: Iterable[str]) -> str:
    """A list."""
    return f"<ul>{''.join(tag('li', item) for item in items)}</ul>"


def table(header: Sequence[str], rows: Sequence[Row]) -> str:
    """A table whose columns sort when their heading is clicked; one with long text may be broader than the page."""
    numeric = {index for row in rows for index, cell in enumerate(row.cells) if cell.number is not None}
    head = "".join(tag("th", name, "number" if index in numeric else "") for index, name in enumerate(header))
    body = "".join(_row(row, numeric) for row in rows)
    looks = "scroll broad" if any(cell.is_long for row in rows for cell in row.cells) else "scroll"
    return f'<div class="{looks}"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def picture(png: bytes, description: str, wide: bool = False) -> str:
    """A picture, embedded."""
    data = base64.b64encode(png).decode("ascii")
    look = ' class="wide"' if wide else ""
    return f'<figure{look}><img alt="{escape(description)}" src="data:image/png;base64,{data}"></figure>'


def _row(row: Row, numeric: set[int]) -> str:
    look = f' class="{escape(row.look)}"' if row.look else ""
    return f"<tr{look}>{''.join(_cell(cell, index in numeric) for index, cell in enumerate(row.cells))}</tr>"


def _cell(cell: Cell, numeric: bool) -> str:
    key = "" if not numeric else f' data-key="{"" if cell.number is None else format(cell.number, ".12g")}"'
    look = ' class="number"' if numeric else ' class="long"' if cell.is_long else ""
    return f"<td{look}{key}>{escape(cell.text)}</td>"
