"""Line plots side by side as one SVG that reads on light and on dark paper. Standard library only."""

import dataclasses
import math
from html import escape

WIDTH, HEIGHT = 300, 240  # of a panel
LEFT, RIGHT, TOP, BOTTOM = 48, 26, 34, 44
LEGEND = 18  # a line of it

STYLE = """
  text { font: 11px sans-serif; fill: #24292f; }
  .title { font-weight: bold; }
  .axis { stroke: #57606a; }
  .grid { stroke: #d0d7de; }
  .line { fill: none; stroke-width: 2; }
  .c0 { stroke: #0969da; } .c1 { stroke: #bc4c00; } .c2 { stroke: #1a7f37; } .c3 { stroke: #8250df; }
  circle { fill: none; stroke-width: 2; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3; }
    .axis { stroke: #8d96a0; }
    .grid { stroke: #30363d; }
    .c0 { stroke: #58a6ff; } .c1 { stroke: #f0883e; } .c2 { stroke: #3fb950; } .c3 { stroke: #bc8cff; }
  }
"""


@dataclasses.dataclass
class Panel:
    title: str
    x_label: str
    lines: dict[str, dict[int, float]]  # by name: x -> y
    log_y: bool = True  # x is always logarithmic


def _ticks(low: float, high: float, log: bool) -> list[float]:
    if log:
        exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        return [10.0**e for e in exponents]
    step = 10 ** math.floor(math.log10(high / 2))
    while high / step > 5:
        step *= 2
    return [i * step for i in range(math.ceil(high / step) + 1)]


def _panel(panel: Panel, left: float) -> list[str]:
    xs = sorted({x for line in panel.lines.values() for x in line})
    ys = [y for line in panel.lines.values() for y in line.values()]
    out = [f'<text class="title" x="{left + LEFT}" y="16">{escape(panel.title)}</text>']
    if not ys:
        return out + [f'<text x="{left + LEFT}" y="{TOP + 20}">not measured</text>']
    ticks = _ticks(min(ys), max(ys), panel.log_y)

    def scale(value: float, low: float, high: float, log: bool) -> float:
        if log:
            value, low, high = math.log(value), math.log(low), math.log(high)
        return (value - low) / (high - low) if high > low else 0.5

    def at_x(x: float) -> float:
        return left + LEFT + scale(x, xs[0], xs[-1], True) * (WIDTH - LEFT - RIGHT)

    def at_y(y: float) -> float:
        return HEIGHT - BOTTOM - scale(y, ticks[0], ticks[-1], panel.log_y) * (HEIGHT - TOP - BOTTOM)

    for tick in ticks:
        y = at_y(tick)
        out.append(f'<line class="grid" x1="{left + LEFT}" x2="{left + WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        out.append(f'<text x="{left + LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    bottom = HEIGHT - BOTTOM
    out.append(f'<line class="axis" x1="{left + LEFT}" x2="{left + WIDTH - RIGHT}" y1="{bottom}" y2="{bottom}"/>')
    for x in xs:
        out.append(f'<text x="{at_x(x):.1f}" y="{bottom + 15}" text-anchor="middle">{x:,}</text>')
    middle = left + (LEFT + WIDTH - RIGHT) / 2
    out.append(f'<text x="{middle}" y="{bottom + 32}" text-anchor="middle">{escape(panel.x_label)}</text>')
    for i, (name, line) in enumerate(panel.lines.items()):
        if not line:
            continue
        points = [(at_x(x), at_y(y)) for x, y in sorted(line.items())]
        out.append(f'<polyline class="line c{i}" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}"/>')
        out += [f'<circle class="c{i}" cx="{x:.1f}" cy="{y:.1f}" r="2.5"/>' for x, y in points]
        y = HEIGHT + LEGEND * i + 4
        out.append(f'<line class="line c{i}" x1="{left + LEFT}" x2="{left + LEFT + 20}" y1="{y}" y2="{y}"/>')
        out.append(f'<text x="{left + LEFT + 26}" y="{y + 4}">{escape(name.replace("_", " "))}</text>')
    return out


def draw(panels: list[Panel]) -> str:
    width = WIDTH * len(panels)
    height = HEIGHT + LEGEND * max(len(panel.lines) for panel in panels) + 4
    body = [line for i, panel in enumerate(panels) for line in _panel(panel, i * WIDTH)]
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">\n'
            f"<style>{STYLE}</style>\n" + "\n".join(body) + "\n</svg>\n")
