"""Decode tok/s against memory bandwidth, with the roofline, as a picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import BenchError
from .compare_table import Line, Table

# One colour a generation, from the first to the last; others are grey.
_SHADES = {
    "M1": "#5b8ff9",
    "M2": "#2f9e8f",
    "M3": "#7fb03d",
    "M4": "#e0952b",
    "M5": "#d1495b",
    "M6": "#8e44ad",
}
_OTHER = "#666666"
_PARTS = (1.0, 0.75, 0.5, 0.25)
# Points of (nearly) one bandwidth stand side by side: width of a step, as a factor.
_NEAR, _STEP = 1.04, 1.03
# A column with its right neighbour nearer than this has its names at the left.
_ROOM = 1.2
_TICKS = tuple(m * 10**e / 10 for e in range(6) for m in (10, 15, 20, 30, 50, 70))


def _shade(line: Line) -> str:
    return _SHADES.get(line.chip.name[:2], _OTHER)


def _plotted(line: Line) -> bool:
    return bool(line.chip.bandwidth_gbs and line.basis and line.basis.decode)


def columns(lines: Sequence[Line]) -> list[list[Line]]:
    """Lines in columns of nearly one bandwidth, from left to right."""
    found: list[list[Line]] = []
    for line in sorted(lines, key=lambda line: line.chip.bandwidth_gbs):
        first = found[-1][0].chip.bandwidth_gbs if found else 0
        if found and line.chip.bandwidth_gbs <= first * _NEAR:
            found[-1].append(line)
        else:
            found.append([line])
    return found


def places(column: Sequence[Line]) -> dict[str, float]:
    """Where each name of a column stands: its bandwidth, a little spread."""
    names = sorted({line.chip.name: line.chip.bandwidth_gbs for line in column}.items())
    middle = (len(names) - 1) / 2
    centre = sum(bandwidth for _, bandwidth in names) / len(names)
    return {name: centre * _STEP ** (i - middle) for i, (name, _) in enumerate(names)}


def draw(table: Table) -> Any:
    """A matplotlib figure of the table; BenchError without matplotlib or bandwidth."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise BenchError("a plot needs matplotlib: pip install matplotlib") from error
    lines = [line for line in table.lines if _plotted(line)]
    if not lines:
        raise BenchError("nothing to plot: no chip with a known bandwidth and speed")
    # Figure, not pyplot: no global state and no window.
    figure = Figure(figsize=(9.5, 6), layout="constrained")
    axes = figure.add_subplot(xscale="log", yscale="log")
    widths = [line.chip.bandwidth_gbs for line in lines]
    speeds = [s.decode for line in lines for s in (line.measured, line.published)
              if s and s.decode]  # fmt: skip
    x = min(widths) / 1.3, max(widths) * 1.4
    y = min(speeds) / 1.4, max(max(speeds) * 2, 1.5 * (table.roof(min(widths)) or 0))
    axes.set(xlim=x, ylim=y)
    names = _roofs(axes, table, x, y)
    found = columns(lines)
    edges = [column[0].chip.bandwidth_gbs for column in found] + [math.inf]
    for column, edge, following in zip(found, edges, edges[1:], strict=False):
        where, above = places(column), following < edge * _ROOM
        for line in column:
            _points(axes, line, where[line.chip.name])
        x_label = min(where.values()) if above else max(where.values())
        _labels(axes, column, x_label, above)
    for axis, limits in ((axes.xaxis, x), (axes.yaxis, y)):
        ticks = [t for t in _TICKS if limits[0] <= t <= limits[1]]
        axis.set_ticks(ticks, [f"{t:g}" for t in ticks])
        axis.set_ticks([], minor=True)
    _text(axes, table)
    axes.grid(color="0.93")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    _legend(axes, lines)
    # The angle of a line of equal MBU is known once the layout is.
    figure.draw_without_rendering()
    (x0, y0), (x1, y1) = axes.transData.transform([(1, 1), (10, 10)])
    for name in names:
        name.set_rotation(math.degrees(math.atan2(y1 - y0, x1 - x0)))
    return figure


def _text(axes: Any, table: Table) -> None:
    same = table.same
    kind = "measured" if table.measured else "published, not measured here"
    axes.set_title(
        f"{same.model}, {same.quant}: decode speed against memory bandwidth\n"
        f"{kind}: {same.build}, {same.tokens or '?'} tokens generated",
        loc="left",
        fontsize=10,
    )
    axes.set(
        xlabel="memory bandwidth as marketed, GB/s (equal ones side by side)",
        ylabel="decode, tok/s",
    )


def _roofs(
    axes: Any, table: Table, x: tuple[float, float], y: tuple[float, float]
) -> list[Any]:
    """Lines of equal MBU; returns the text along each, still level."""
    names: list[Any] = []
    slope = table.roof(1.0)
    if not slope:
        return names
    for part in _PARTS:
        axes.plot(
            x,
            [part * slope * edge for edge in x],
            color="0.3" if part == 1 else "0.7",
            lw=1.6 if part == 1 else 0.9,
            ls="-" if part == 1 else (0, (5, 4)),
            zorder=1,
        )
        # The upper or right end, whichever comes first; none if it is not to be seen.
        end = min(x[1], y[1] / (part * slope)) / 1.03
        if end < 1.5 * x[0] or part * slope * end < y[0]:
            continue
        text = "roofline: 100 % MBU" if part == 1 else f"{100 * part:.0f} % MBU"
        names.append(
            axes.text(
                end,
                part * slope * end * 1.02,
                text,
                rotation_mode="anchor",
                ha="right",
                fontsize=8,
                color="0.35",
                zorder=1,
            )
        )
    return names


def _points(axes: Any, line: Line, x: float) -> None:
    shade = _shade(line)
    if line.predicted:
        p = line.predicted.decode
        axes.plot([x, x], [p.low, p.high], color=shade, lw=6, alpha=0.22, zorder=2,
                  solid_capstyle="butt")  # fmt: skip
        axes.plot(x, p.speed, "_", color=shade, ms=12, mew=1.6, zorder=3)
    if line.published and line.published.decode:
        axes.plot(x, line.published.decode, "o", mfc="white", mec=shade, mew=1.7,
                  ms=6, zorder=4)  # fmt: skip
    if line.measured:
        if line.measured.decode:
            axes.plot(x, line.measured.decode, "D", color=shade, ms=7, zorder=5)
        if line.measured.stock_decode:
            axes.plot(x, line.measured.stock_decode, "x", color=shade, ms=7, mew=1.8,
                      zorder=5)  # fmt: skip


def _labels(axes: Any, column: Sequence[Line], x: float, above: bool) -> None:
    """The names of a column, the fastest on top: up at its left or down at its right,
    where the diagonal of the points leaves room."""
    best: dict[str, Line] = {}
    for line in column:
        name = line.chip.name
        if name not in best or line.basis.decode > best[name].basis.decode:
            best[name] = line
    ordered = sorted(best.values(), key=lambda line: line.basis.decode)
    low, high = axes.get_ylim()
    gap = (high / low) ** 0.032
    if above:
        tops = [line.basis.decode for line in column]
        tops += [line.predicted.decode.high for line in column if line.predicted]
        y = max(tops) * gap**0.8
    else:
        ordered.reverse()
        y, gap = ordered[0].basis.decode, 1 / gap
    for line in ordered:
        if not above:
            y = min(y, line.basis.decode)
        axes.annotate(
            line.chip.name,
            (x, y),
            xytext=(4 if above else 9, 0),
            textcoords="offset points",
            ha="right" if above else "left",
            va="center",
            fontsize=8,
            color=_shade(line),
        )
        y *= gap


def _legend(axes: Any, lines: Sequence[Line]) -> None:
    marks = []
    if any(line.measured for line in lines):
        marks.append(("D", "measured, patched", {"color": _OTHER}))
        marks.append(("x", "measured, stock", {"color": _OTHER}))
    if any(line.published for line in lines):
        text = "published, one for each core count"
        marks.append(("o", text, {"mfc": "white", "mec": _OTHER}))
    if any(line.predicted for line in lines):
        text = "predicted (without rows of that chip), with interval"
        if not all(line.published for line in lines if line.predicted):
            text = "predicted, with interval"
        marks.append(("_", text, {"color": _OTHER, "ms": 12, "mew": 1.6}))
    for mark, label, style in marks:
        axes.plot([], [], mark, label=label, **style)
    axes.legend(loc="lower right", frameon=False, fontsize=8)


def save(table: Table, path: Path) -> None:
    """Write the picture; BenchError for a folder or an unknown ending."""
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise BenchError(f"--plot {path}: name a .png, .svg or .pdf file")
    draw(table).savefig(path, dpi=130)
