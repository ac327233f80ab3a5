"""A report in one file: text, tables and figures, as HTML or Markdown that needs no other file."""

import base64
import html
import io
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.axes import Axes

from pbnn.errors import FileError
from pbnn.files import writing

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Section", "write_report"]

_STYLE = (
    "body{font:16px/1.5 sans-serif;max-width:60em;margin:2em auto;padding:0 1em}"
    "table{border-collapse:collapse}td,th{padding:.2em .8em;text-align:right;"
    "border-bottom:1px solid #ddd}td:first-child,th:first-child{text-align:left}"
    "img{max-width:100%}"
)


@dataclass(frozen=True)
class Section:
    """A part of a report.

    Attributes:
        title: Its heading.
        text: Lines, each a paragraph.
        tables: Tables, whose index is their first column.
        figures: Axes with their captions.
    """

    title: str
    text: Sequence[str] = ()
    tables: "Sequence[pd.DataFrame]" = ()
    figures: Sequence[tuple[Axes, str]] = field(default_factory=tuple)


def write_report(
    path: str | os.PathLike[str], title: str, sections: Sequence[Section], *, dpi: int = 100
) -> Path:
    """Write a report with its figures inside; the file appears when it is complete.

    Args:
        path: File name that ends in `.html` or `.md`.
        title: Title of the page.
        sections: Its parts.
        dpi: Dots per inch of the figures.

    Raises:
        FileError: The name ends in something else.
    """
    path = Path(path)
    pages = {".html": _html, ".htm": _html, ".md": _markdown}
    if path.suffix.lower() not in pages:
        raise FileError(f"{path}: a report ends in .html or .md")
    page = pages[path.suffix.lower()](title, sections, dpi)
    with writing(path) as temporary:
        temporary.write_text(page, encoding="utf-8")
    return path


def _picture(axes: Axes, dpi: int) -> str:
    """Return the figure of some axes as a data URL."""
    figure = axes.get_figure(root=True)
    assert figure is not None
    held = io.BytesIO()
    figure.savefig(held, dpi=dpi, format="png")
    return f"data:image/png;base64,{base64.b64encode(held.getvalue()).decode()}"


def _cells(table: "pd.DataFrame") -> list[list[str]]:
    """Return header and rows of a table as text, its index in the first columns."""

    def text(value: object) -> str:
        return f"{value:.4g}" if isinstance(value, float) else str(value)

    frame = table.reset_index() if any(table.index.names) else table
    header = [str(column) for column in frame.columns]
    rows = frame.astype(object).to_numpy().tolist()
    return [header, *([text(value) for value in row] for row in rows)]


def _html(title: str, sections: Sequence[Section], dpi: int) -> str:
    out = [
        "<!doctype html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>',
        f"<style>{_STYLE}</style></head><body><h1>{html.escape(title)}</h1>",
    ]
    for section in sections:
        out.append(f"<h2>{html.escape(section.title)}</h2>")
        out += [f"<p>{html.escape(line)}</p>" for line in section.text]
        for table in section.tables:
            header, *rows = _cells(table)
            out.append("<table>")
            for tag, cells in [("th", header), *(("td", row) for row in rows)]:
                row = "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells)
                out.append(f"<tr>{row}</tr>")
            out.append("</table>")
        for axes, caption in section.figures:
            picture, words = _picture(axes, dpi), html.escape(caption)
            out.append(
                f'<figure><img src="{picture}" alt="{words}"><figcaption>{words}</figcaption>'
                "</figure>"
            )
    return "\n".join([*out, "</body></html>", ""])


def _markdown(title: str, sections: Sequence[Section], dpi: int) -> str:
    def row(cells: Sequence[str]) -> str:
        inside = " | ".join(cell.replace("|", "\\|") for cell in cells)
        return f"| {inside} |"

    out = [f"# {title}"]
    for section in sections:
        out += [f"## {section.title}", *section.text]
        for table in section.tables:
            header, *rows = _cells(table)
            out.append("\n".join(map(row, [header, ["---"] * len(header), *rows])))
        out += [f"![{words}]({_picture(axes, dpi)})\n\n{words}" for axes, words in section.figures]
    return "\n\n".join(out) + "\n"
