"""HTML for scripts/report.py: elements, charts as inline SVG, tables, and the document.

Axis labels are HTML next to the SVG: their size does not change when the chart scales with the
window. `element` escapes all text: no name or config value of a run can become markup.
"""

import base64
import hashlib
import html
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

Point = tuple[float, float]  # a y that is not finite makes a gap

BUCKETS = 250  # of a long curve; each has a mean, a minimum and a maximum
SPAN = 10_000  # width and height of a chart in SVG units: integers are precise to 1/20 pixel
COLOURS = 8  # further curves are dashed
UNSAFE = re.compile(
    "[^\t\n\x20-\x7e\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]|[\u202a-\u202e\u2066-\u2069]"
)
MAX_DOTS = 30  # points of a curve that are marked


class Markup(str):
    """Text that is already HTML."""

    __slots__ = ()


def escape(text: object) -> Markup:
    """Escape text for HTML and XML.

    Replaces characters that neither can contain (control characters, unpaired surrogates) and
    characters that change the direction of the text after them.
    """
    return text if isinstance(text, Markup) else Markup(html.escape(UNSAFE.sub("�", str(text))))


def element(tag: str, *content: object, **attributes: object) -> Markup:
    """Make an element. `class_` is class, `data_x` is data-x; an attribute of None is left out."""
    opened = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{escape(value)}"'
        for name, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{tag}{opened}>{''.join(map(escape, content))}</{tag}>")


# Numbers.


def number(value: float) -> str:
    """Format with 3 or 4 significant digits: 7,290, 76.13, 0.123, 1e-5. SCRIPT does the same."""
    if not math.isfinite(value):
        return "–"
    if 1000 <= abs(value) < 1e15:
        return f"{value:,.0f}"
    digits = 4 if abs(value) >= 1 else 3
    return re.sub(r"e([+-])0*", r"e\1", f"{value:.{digits}g}")


def percent(fraction: float) -> str:
    return f"{100 * fraction:.1f} %"


def duration(seconds: float) -> str:
    """Format as 40 s, 12 min 5 s, 5 h 12 min or 2 d 3 h."""
    if not math.isfinite(seconds):
        return "–"
    if seconds < 10:
        return f"{seconds:.1f} s"
    left = round(seconds)
    units = [("d", 86400), ("h", 3600), ("min", 60), ("s", 1)]
    for (large, size), (small, small_size) in pairwise(units):
        if left >= size:
            rest = left % size // small_size
            return f"{left // size:,} {large}" + (f" {rest} {small}" if rest else "")
    return f"{left} s"


# Axes.


@dataclass(frozen=True)
class Axis:
    """An axis from `low` to `high` with (place, text) ticks; the cursor shows `name`."""

    low: float
    high: float
    ticks: list[tuple[float, str]]
    name: str = ""
    log: bool = False

    def part(self, value: float) -> float:
        """Return the relative position: 0 at `low`, 1 at `high`."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def nice_step(span: float, count: int) -> float:
    """Return 1, 2 or 5 times a power of ten so that at most `count` steps cover `span`."""
    power = 10.0 ** math.floor(math.log10(span / count))
    steps = (power * factor for factor in (1, 2, 5, 10, 20))
    return next(step for step in steps if step * count >= span * (1 - 1e-9))


def tick_text(value: float, step: float, most: float) -> str:
    """Format with the decimals of the step; an axis up to 10,000 or more uses k or M."""
    if value == 0:
        return "0"
    if step < 1e-4 or most >= 1e12:
        return number(float(f"{value:.4g}"))
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if most >= 10 * size:
            return f"{value / size:.6g}{letter}"
    exact = (d for d in range(6) if math.isclose(step, round(step, d), rel_tol=1e-6))
    decimals = next(exact, 6)
    return f"{value:,.{decimals}f}"


def linear_axis(
    low: float, high: float, *, count: int = 5, widen: bool = False, name: str = ""
) -> Axis:
    """Make an axis with about `count` ticks; `widen` makes it begin and end at a tick."""
    if not high - low > max(1e-9 * max(abs(low), abs(high)), 1e-300):  # a single value
        low, high = (low - abs(low) / 2, high + abs(high) / 2) if abs(low) > 1e-300 else (0.0, 1.0)
    step = nice_step(high - low, count)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    if widen:
        low, high = first * step, last * step
    margin = step * 1e-6
    places = [i * step for i in range(first, last + 1) if low - margin <= i * step <= high + margin]
    most = max(map(abs, places), default=0)
    return Axis(low, high, [(place, tick_text(place, step, most)) for place in places], name)


def log_axis(low: float, high: float) -> Axis:
    powers = range(math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9) + 1)
    steps = [f * 10.0**p for p in powers for f in (1, 2, 5)]
    inner = [s for s in steps if low <= s <= high]
    low = max((s for s in steps if s <= low), default=low)
    high = min((s for s in steps if s >= high), default=high)
    if len(inner) > 6:
        inner = [10.0**p for p in powers][:: max(1, len(powers) // 5)]
    places = [s for s in inner if low <= s <= high]
    return Axis(low, high, [(s, number(s)) for s in places], log=True)


# Curves.


@dataclass(frozen=True)
class Curve:
    """A curve.

    Attributes:
        style: Number of the colour.
        edges: Minimum and maximum at each point, drawn as a band.
        dots: Mark the points if there are few.
    """

    label: str
    points: list[Point]
    style: int = 0
    edges: list[tuple[float, float]] | None = None
    dots: bool = False


def thin(curve: Curve) -> tuple[list[Point], list[tuple[float, float, float]]]:
    """Return the line and the band around it as (x, low, high).

    A long curve becomes about 250 means, and its band contains every value. A short curve does not
    change.
    """
    points = curve.points
    edges = curve.edges or []
    if len(points) <= 2 * BUCKETS:
        return points, [(x, *edge) for (x, _), edge in zip(points, edges, strict=False)]
    size = math.ceil(len(points) / BUCKETS)
    line, band = [], []
    for start in range(0, len(points), size):
        chunk = points[start : start + size]
        values = [y for _, y in chunk if math.isfinite(y)]
        bounds = [y for edge in edges[start : start + size] for y in edge if math.isfinite(y)]
        bounds += values
        x = fmean(x for x, _ in chunk)
        line.append((x, fmean(values) if values else math.nan))
        band.append((x, min(bounds, default=math.nan), max(bounds, default=math.nan)))
    return line, band


def stretches(points: Sequence[tuple[float, ...]]) -> Iterator[list[tuple[float, ...]]]:
    """Yield the parts between gaps."""
    stretch: list[tuple[float, ...]] = []
    for point in points:
        if all(map(math.isfinite, point)):
            stretch.append(point)
        elif stretch:
            yield stretch
            stretch = []
    if stretch:
        yield stretch


def line_chart(
    title: str,
    curves: Sequence[Curve],
    x: Axis,
    *,
    zero: bool = False,
    most: float = math.inf,
    log_above: float = math.inf,
    named: bool = True,
) -> Markup:
    """Draw curves over `x`, with the last value of each in the legend; nothing without values.

    Args:
        zero: The y axis includes 0.
        most: The largest possible value, where the y axis ends at the latest.
        log_above: The y axis is logarithmic if all values are positive and the ratio of the largest
            to the smallest exceeds this.
        named: Name the curves in the legend; with one curve the title may be enough.
    """
    curves = [c for c in curves if any(math.isfinite(y) for _, y in c.points)]
    if not curves:
        return Markup()
    thinned = [thin(c) for c in curves]
    points = [point for line, band in thinned for point in (*line, *band)]
    y = value_axis([v for point in points for v in point[1:]], zero, most, log_above)

    def across(value: float) -> int:
        return round(SPAN * x.part(value))

    def down(value: float) -> int:
        return round(SPAN * (1 - y.part(value)))

    drawn, legend = [], []
    for i, (curve, (line, band)) in enumerate(zip(curves, thinned, strict=True)):
        colour = style_class(curve.style)
        for stretch in stretches(band):
            edge = [(a, top) for a, _, top in stretch]
            edge += [(a, bottom) for a, bottom, _ in reversed(stretch)]
            outline = polyline(edge, across, down) + "Z"
            drawn.append(element("path", class_=f"band {colour}", d=outline))
        lines = "".join(polyline(stretch, across, down) for stretch in stretches(line))
        drawn.append(element("path", class_=f"line {colour}", data_s=i, d=lines))
        if len(line) == 1 or (curve.dots and len(line) <= MAX_DOTS):
            dots = "".join(f"M{across(a)} {down(b)}h0" for a, b in line if math.isfinite(b))
            drawn.append(element("path", class_=f"dots {colour}", d=dots))
        last = next(v for _, v in reversed(curve.points) if math.isfinite(v))
        legend.append(legend_entry(curve.label if named else "", colour, number(last), i))
    return chart(title, drawn, legend, x, y)


def value_axis(values: Sequence[float], zero: bool, most: float, log_above: float) -> Axis:
    """Make the y axis of `line_chart`."""
    finite = [value for value in values if math.isfinite(value)]
    low, high = min(finite), max(finite)
    if low > 1e-9 and high / low > log_above:
        return log_axis(low, high)
    if zero:
        low, high = min(0.0, low), max(0.0, high)
    axis = linear_axis(low, high, widen=True)
    return linear_axis(axis.low, most, widen=True) if high <= most < axis.high else axis


def polyline(
    points: Sequence[tuple[float, ...]],
    across: Callable[[float], int],
    down: Callable[[float], int],
) -> str:
    """Return M and L commands of a path; a single point becomes a dot."""
    path = "M" + "L".join(f"{across(p[0])} {down(p[1])}" for p in points)
    return path + "h0" if len(points) == 1 else path


def style_class(style: int) -> str:
    return f"c{style % COLOURS}" + (" dashed" if style >= COLOURS else "")


@dataclass(frozen=True)
class Column:
    """Fractions of a whole, from x = `begin` to `end`."""

    begin: float
    end: float
    shares: list[float]


def share_chart(
    title: str, parts: Sequence[tuple[str, str]], columns: Sequence[Column], x: Axis
) -> Markup:
    """Draw the fractions of `parts` (name, class) in percent as stacked columns over `x`."""
    largest = 100 * max(sum(column.shares) for column in columns)
    y = linear_axis(0, max(1.0, min(100.0, largest)), widen=True)
    drawn, legend = [], []
    for i, (name, kind) in enumerate(parts):
        path = []
        for column in columns:
            below = 100 * sum(column.shares[:i])
            above = below + 100 * column.shares[i]
            left, right = (round(SPAN * x.part(place)) for place in (column.begin, column.end))
            bottom, top = (round(SPAN * (1 - y.part(place))) for place in (below, above))
            path.append(f"M{left} {bottom}H{right}V{top}H{left}Z")
        drawn.append(element("path", class_=f"area {kind}", data_s=i, d="".join(path)))
        legend.append(legend_entry(name, kind, number(100 * columns[-1].shares[i]), i))
    return chart(title, drawn, legend, x, y)


def legend_entry(label: str, kind: str, value: str, index: int) -> Markup:
    """Show a curve's colour, name and last value; only the value if it has no name."""
    if not label:
        return element("span", element("output", value), class_="key alone", data_s=index)
    colour = element("i", class_=kind)
    name = element("bdi", label, title=label)
    return element("span", colour, name, element("output", value), class_="key", data_s=index)


def chart(
    title: str, drawn: Sequence[Markup], legend: Sequence[Markup], x: Axis, y: Axis
) -> Markup:
    """Draw the axes around a chart."""
    grid = "".join(f"M0 {round(SPAN * (1 - y.part(place)))}H{SPAN}" for place, _ in y.ticks)
    grid += "".join(f"M{round(SPAN * x.part(place))} {SPAN}V0" for place, _ in x.ticks)
    lines = element("path", class_="grid", d=grid)
    labels = []
    for place, text in y.ticks:
        style = f"top:{100 * (1 - y.part(place)):.2f}%"
        labels.append(element("span", text, class_="y", style=style))
    for place, text in x.ticks:
        style = f"left:{100 * x.part(place):.2f}%"
        labels.append(element("span", text, class_="x", style=style))
    labels.append(element("span", x.name, class_="x name"))
    svg = element(
        "svg",
        lines,
        *drawn,
        viewBox=f"0 0 {SPAN} {SPAN}",
        preserveAspectRatio="none",
        role="img",
        aria_label=title,
    )
    return element(
        "figure",
        element("figcaption", element("b", title), element("output", class_="at"), *legend),
        element("div", svg, *labels, class_="plot"),
        class_="chart",
        data_name=x.name,
        data_x=f"{x.low!r} {x.high!r}",
        data_y=f"{y.low!r} {y.high!r}",
        data_log="" if y.log else None,
    )


# The rest of the page.


def share_bar(parts: Sequence[tuple[str, str, float]]) -> Markup:
    """Draw one bar, divided into (name, class, fraction)."""
    found = []
    for name, kind, share in parts:
        title = f"{name}: {percent(share)}"
        found.append(element("i", class_=kind, style=f"width:{100 * share:.3f}%", title=title))
    return element("div", *found, class_="bar")


def bars(rows: Sequence[tuple[str, float, str]]) -> Markup:
    """Draw a bar for each (name, value, text)."""
    most = max((value for _, value, _ in rows), default=0) or 1
    found = []
    for name, value, text in rows:
        filled = element("i", class_="c0", style=f"width:{100 * value / most:.2f}%")
        bar = element("div", filled, class_="bar")
        found.append(element("div", element("span", name), element("span", text), bar))
    return element("div", *found, class_="card bars")


def pairs(rows: Sequence[Sequence[str]]) -> Markup:
    """List (name, value) in as many columns as fit."""
    found = [element("div", element("dt", name), element("dd", text)) for name, text in rows]
    return element("dl", *found, class_="card pairs")


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, numeric: bool = True) -> Markup:
    """Make a table; its first column stays visible if the table is wider than the window."""
    top = element("thead", element("tr", *(element("th", cell, scope="col") for cell in head)))
    body = []
    for name, *cells in rows:
        cells = [element("td", cell) for cell in cells]
        body.append(element("tr", element("th", name, scope="row"), *cells))
    content = element("table", top, element("tbody", *body), class_="numeric" if numeric else None)
    return element("div", content, class_="scroll", tabindex=0)


def tiles(rows: Sequence[tuple[str, str, str]]) -> Markup:
    """Show (name, value, remark)."""
    found = []
    for name, value, remark in rows:
        texts = element("span", name), element("b", value), element("small", remark)
        found.append(element("div", *texts))
    return element("div", *found, class_="tiles")


def section(title: str, *content: str) -> Markup:
    """Make a section; nothing without content."""
    return element("section", element("h2", title), *content) if any(content) else Markup()


def figures(*charts: str) -> Markup:
    """Arrange charts side by side, as many as fit."""
    return element("div", *charts, class_="charts") if any(charts) else Markup()


def details(title: str, *content: str) -> Markup:
    return element("details", element("summary", title), *content)


def document(title: str, *content: str) -> str:
    """Make a self-contained page; its policy forbids connections and scripts other than its own."""
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en">',
            '<head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            element("title", title),
            f"<style>{STYLE}</style></head>",
            element("body", element("main", *content)),
            f"<script>{SCRIPT}</script>",
            "</html>\n",
        ]
    )


STYLE = """
:root {
  color-scheme: light dark;
  --page: #f5f6f8; --card: #fff; --ink: #1b2330; --dim: #5b6675; --rule: #dfe3e9; --grid: #e6e9ee;
  --c0: #1f66d1; --c1: #d9560b; --c2: #23843a; --c3: #9135ad; --c4: #c01f57; --c5: #0b7a8c;
  --c6: #8a5a3c; --c7: #66707f;
  --compute: #5a9e78; --copy: #6f9fe0; --wait: #d9483b; --late: #eda035; --ranks: #a8503f;
  --validation: #9a7bd0; --checkpoint: #c07fa6;
  --start: #8f2d56; --profile: #7a9b3c; --rest: #b9c0ca;
  --good: #1d7a3d; --fair: #a15c00; --busy: #1f66d1; --bad: #b3261e;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #12161c; --card: #1a2028; --ink: #e6eaf0; --dim: #9aa5b4; --rule: #303945;
    --grid: #2a323d;
    --c0: #6aa5ff; --c1: #ff9a4d; --c2: #63c97d; --c3: #cf8af0; --c4: #ff7ba6; --c5: #4cc3d6;
    --c6: #c99a78; --c7: #a3adba;
    --compute: #4d8a68; --copy: #5584c7; --wait: #e0604f; --late: #d99a3a; --ranks: #b5705f;
    --validation: #8a6cc2; --checkpoint: #a86a90;
    --start: #c04f80; --profile: #7a9b3c; --rest: #566170;
    --good: #6fd08c; --fair: #f0b35a; --busy: #7ab0ff; --bad: #ff8a80;
  }
}
.c0 { --k: var(--c0) } .c1 { --k: var(--c1) } .c2 { --k: var(--c2) } .c3 { --k: var(--c3) }
.c4 { --k: var(--c4) } .c5 { --k: var(--c5) } .c6 { --k: var(--c6) } .c7 { --k: var(--c7) }
.p-compute { --k: var(--compute) } .p-copy { --k: var(--copy) } .p-wait { --k: var(--wait) }
.p-late { --k: var(--late) } .p-ranks { --k: var(--ranks) }
.p-validation { --k: var(--validation) } .p-checkpoint { --k: var(--checkpoint) }
.p-start { --k: var(--start) }
.p-profile { --k: var(--profile) } .p-rest { --k: var(--rest) }
* { box-sizing: border-box }
html { -webkit-text-size-adjust: 100% }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif }
main { max-width: 74rem; margin: 0 auto; padding: 1.25rem clamp(.75rem, 3vw, 2rem) 3rem;
  overflow-wrap: anywhere }
h1, h2, h3, p, ul, dl, dd, figure { margin: 0; padding: 0 }
h1 { font-size: clamp(1.35rem, 4vw, 1.8rem); line-height: 1.25 }
h2 { font-size: 1.1rem; margin: 2rem 0 .6rem }
h3 { font-size: 1rem }
i { font-style: normal; background: var(--k) }
header p { margin-top: .35rem }
header p, .dim { color: var(--dim) }
.card, .chart, .tiles > div, .scroll, details { background: var(--card);
  border: 1px solid var(--rule); border-radius: .5rem }
.card { padding: .8rem 1rem }
.status { display: inline-block; padding: .1rem .55rem; border: 1px solid; border-radius: 1rem;
  font-size: .8rem;
  line-height: 1.4; font-weight: 600; vertical-align: middle }
.finished { color: var(--good) }
.interrupted { color: var(--fair) }
.running { color: var(--busy) }
.ended { color: var(--bad) }
.runs { list-style: none; display: grid; gap: .5rem; margin-top: .6rem }
.runs li { display: flex; flex-wrap: wrap; gap: .1rem .6rem; align-items: center }
.run, .key { display: inline-flex; align-items: baseline; gap: .4rem; max-width: 100% }
.run i, .key i { flex: none; width: .7rem; height: .7rem; border-radius: .2rem }
i.dashed { background: repeating-linear-gradient(90deg, var(--k) 0 2px, transparent 2px 4px) }

.verdict { margin-top: 1rem; border-left: 4px solid var(--c0) }
.verdict ul { list-style: none; display: grid; gap: .35rem }
.verdict li:first-child { font-weight: 600 }
.verdict h3:not(:first-child) { margin-top: .9rem }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(7.9rem, 1fr)); gap: .6rem;
  margin-top: 1rem }
.tiles > div { padding: .55rem .75rem; display: grid; align-content: start;
  font-variant-numeric: tabular-nums }
.tiles span { color: var(--dim); font-size: .8rem }
.tiles b { font-size: 1.3rem; line-height: 1.3 }
.tiles small { color: var(--dim) }

.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr));
  gap: .8rem }
.chart { padding: .65rem .8rem 1.9rem; min-width: 0; display: flex; flex-direction: column }
.chart figcaption { flex: 1 0 auto; display: flex; flex-wrap: wrap; gap: 0 .9rem;
  align-items: baseline; align-content: start;
  margin-bottom: .6rem; font-variant-numeric: tabular-nums }
.chart figcaption b { flex: 1 }
.chart figcaption::after { content: ""; order: 1; flex-basis: 100% }
.at, .key { font-size: .82rem; color: var(--dim) }
.key { order: 2 }
.key bdi { overflow: hidden; text-overflow: ellipsis; white-space: nowrap; max-width: 14rem }
.key output { color: var(--ink); min-width: 2.6rem; white-space: nowrap }
.alone { order: 0 }
.alone output { text-align: right }
.plot { position: relative; height: 11.5rem; margin: 0 .5rem 0 2.7rem; touch-action: pan-y }
.plot svg { display: block; width: 100%; height: 100%; overflow: visible }
.plot path { vector-effect: non-scaling-stroke; fill: none }
.plot .grid { stroke: var(--grid); stroke-width: 1 }
.plot .line { stroke: var(--k); stroke-width: 1.8; stroke-linejoin: round; stroke-linecap: round }
.plot .dots { stroke: var(--k); stroke-width: 5; stroke-linecap: round }
.plot .dashed { stroke-dasharray: 5 4 }
.plot .band { fill: var(--k); fill-opacity: .2 }
.plot .area { fill: var(--k); shape-rendering: crispEdges }
.plot span { position: absolute; color: var(--dim); font-size: .75rem; line-height: 1;
  font-variant-numeric: tabular-nums;
  white-space: nowrap }
.plot .y { right: 100%; margin-right: .45rem; transform: translateY(-50%) }
.plot .x { top: 100%; margin-top: .45rem; transform: translateX(-50%) }
.plot .name { right: 100%; margin-right: .7rem; transform: none }
.cursor { position: absolute; top: 0; bottom: 0; border-left: 1px solid var(--dim);
  pointer-events: none }

.bar { display: flex; height: 1.4rem; border-radius: .3rem; overflow: hidden;
  background: var(--grid) }
.split { display: grid; gap: .3rem; margin-bottom: .8rem }
.split .bar:not(:last-child) { margin-bottom: .3rem }
.bars { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 18rem), 1fr));
  gap: .6rem 2rem;
  margin-bottom: .8rem }
.bars > div { display: grid; grid-template-columns: 1fr auto; gap: .2rem 1rem }
.bars .bar { grid-column: 1 / -1; height: .9rem }
.pairs { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 18rem), 1fr));
  gap: 0 2rem;
  align-content: start; padding: 0 1rem .1rem; overflow: hidden }
.pairs > div { display: flex; justify-content: space-between; gap: 1rem; padding: .35rem 0;
  border-top: 1px solid var(--rule);
  margin-top: -1px }
.pairs dt { color: var(--dim) }
.pairs dd { flex: none; max-width: 75%; text-align: right; font-variant-numeric: tabular-nums }

.scroll { overflow-x: auto }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
th, td { padding: .32rem .8rem; text-align: left; vertical-align: top;
  border-bottom: 1px solid var(--rule) }
tbody tr:last-child > * { border-bottom: 0 }
th[scope=row] { font-weight: 400; color: var(--dim); position: sticky; left: 0;
  background: var(--card);
  overflow-wrap: break-word; min-width: 7.5rem; max-width: 12rem }
thead th { font-size: .85rem; max-width: 16rem }
thead th:not(:first-child) { min-width: 9rem }
td { max-width: 28rem }
.numeric td { white-space: nowrap; overflow: hidden; text-overflow: ellipsis }
.numeric td, .numeric thead th { text-align: right }
td b { color: var(--good) }
details { margin-top: .8rem; padding: .55rem .9rem }
summary { cursor: pointer; font-weight: 600 }
details .scroll, details .card { border: 0; padding: 0; margin-top: .4rem }
pre { margin: .6rem 0 0; overflow-x: auto;
  font: .82rem/1.45 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace }
footer { margin-top: 2rem; color: var(--dim); font-size: .85rem }
footer ul { padding-left: 1.1rem; margin-bottom: .5rem }
@media (max-width: 34rem) {
  .plot { height: 10rem }
  table { font-size: .85rem }
  th, td { padding: .32rem .5rem }
  th[scope=row] { min-width: 6rem; max-width: 8.5rem }
  thead th { font-size: .8rem; max-width: 10rem }
  thead th:not(:first-child) { min-width: 8rem }
}
@media print {
  body { background: none }
  .chart, .card { break-inside: avoid }
}
"""

# Shows the values at the cursor in every chart with the same x axis, from the paths' coordinates.
SCRIPT = """
"use strict";
const SPAN = 10000;
const show = v => Math.abs(v) >= 1000 && Math.abs(v) < 1e15
  ? Math.round(v).toLocaleString("en-US")
  : String(Number(v.toPrecision(Math.abs(v) >= 1 ? 4 : 3)));
const charts = Array.from(document.querySelectorAll(".chart"), node => {
  const plot = node.querySelector(".plot"), [x0, x1] = node.dataset.x.split(" ").map(Number);
  const [y0, y1] = node.dataset.y.split(" ").map(Number), log = "log" in node.dataset;
  const cursor = document.createElement("div");
  cursor.className = "cursor";
  cursor.hidden = true;
  plot.append(cursor);
  const values = Array.from(node.querySelectorAll("path[data-s]"), path => {
    const output = node.querySelector(`.key[data-s="${path.dataset.s}"] output`);
    const all = path.getAttribute("d").replace(/h0/g, "").match(/-?\\d+/g).map(Number);
    const area = path.matches(".area");
    const xs = [], ys = [];
    for (let i = 0; i < all.length; i += area ? 5 : 2) {  // an area: left bottom right top left
      xs.push(area ? all[i + 2] : all[i]);
      const part = area ? (all[i + 1] - all[i + 3]) / SPAN : 1 - all[i + 1] / SPAN;
      ys.push(log ? y0 * Math.pow(y1 / y0, part) : y0 + (y1 - y0) * part);
    }
    const at = x => {
      let low = 0, high = xs.length - 1;
      while (low < high) {  // find the first point that is not left of x
        const middle = (low + high) >> 1;
        if (xs[middle] < x) low = middle + 1; else high = middle;
      }
      return ys[!area && low && x - xs[low - 1] < xs[low] - x ? low - 1 : low];
    };
    return {output, at, last: output.textContent};
  });
  return {plot, x0, x1, cursor, values, name: node.dataset.name, said: node.querySelector(".at")};
});
const read = (chart, event) => {
  const box = chart.plot.getBoundingClientRect();
  const part = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
  const x = chart.x0 + part * (chart.x1 - chart.x0);
  for (const other of charts) {
    if (other.name !== chart.name) continue;
    const place = (x - other.x0) / (other.x1 - other.x0);
    other.cursor.hidden = false;
    other.cursor.style.left = 100 * place + "%";
    other.said.textContent = chart.name + " " + show(x);
    for (const value of other.values) value.output.textContent = show(value.at(place * SPAN));
  }
};
const leave = () => {
  for (const chart of charts) {
    chart.cursor.hidden = true;
    chart.said.textContent = "";
    for (const value of chart.values) value.output.textContent = value.last;
  }
};
for (const chart of charts) {
  chart.plot.addEventListener("pointermove", event => read(chart, event));
  chart.plot.addEventListener("pointerdown", event => read(chart, event));
  chart.plot.addEventListener("pointerleave", leave);
}
"""
