# Draws docs/ladder.svg, the picture of the README, from the JSON of a verdict: one row a
# slice, worst first; the measured value with its interval, the floor, and the limit.
#
#     servanda check examples/tiny-bf16-positions.kernelcontract.yaml --format json > v.json
#     python scripts/draw_ladder.py v.json docs/ladder.svg

import json
import math
import sys
from pathlib import Path

WIDTH, ROW, TOP, LEFT, RIGHT = 860, 34, 88, 150, 150
LOW, HIGH = 1e-4, 1.0  # of the log axis
GLYPH = {"violated": "✗", "holds": "✓", "inconclusive": "?"}
STYLE = """
text { font: 14px system-ui, sans-serif; fill: #24292f }
.title { font-size: 19px; font-weight: 600 }
.grey { fill: #6e7781; font-size: 12px }
.axis { stroke: #d0d7de }
.limit { stroke: #9a6700; stroke-width: 2; stroke-dasharray: 4 3 }
.floor { fill: #8c959f; opacity: .35 }
.holds { stroke: #1a7f37; fill: #1a7f37 } .violated { stroke: #cf222e; fill: #cf222e }
.inconclusive { stroke: #6e7781; fill: #6e7781 }
text.violated, text.holds { stroke: none }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .grey { fill: #8d96a0 } .axis { stroke: #30363d }
  .limit { stroke: #d29922 }
  .holds { stroke: #3fb950; fill: #3fb950 } .violated { stroke: #f85149; fill: #f85149 }
}
"""


def x(value: float) -> float:
    """Place on the log axis."""
    share = math.log(max(value, LOW) / LOW) / math.log(HIGH / LOW)
    return LEFT + share * (WIDTH - LEFT - RIGHT)


def row(cell: dict, y: float) -> str:
    low, high = cell["interval"]
    outcome, value = cell["outcome"], cell["value"]
    at, limit = f"{x(value):.1f}", f"{x(cell['limit']):.1f}"
    floor = x(cell["floor"]) - LEFT if cell["floor"] else 0
    return f"""
<text x="{LEFT - 14}" y="{y + 5}" text-anchor="end">{cell["slice"].replace("<", "&lt;")}</text>
<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>
<rect class="floor" x="{LEFT}" y="{y - 6}" width="{floor:.1f}" height="12"/>
<line class="{outcome}" x1="{x(low):.1f}" x2="{x(high):.1f}" y1="{y}" y2="{y}" stroke-width="3"/>
<circle class="{outcome}" cx="{at}" cy="{y}" r="6"/>
<line class="limit" x1="{limit}" x2="{limit}" y1="{y - 13}" y2="{y + 13}"/>
<text class="{outcome}" x="{WIDTH - RIGHT + 16}" y="{y + 5}">{GLYPH[outcome]} {value:.4f}</text>"""


def ladder(verdict: dict) -> str:
    cells = [c for c in verdict["cells"] if c["metric"] == "tv" and c["interval"]]
    cells.sort(key=lambda c: (c["slice"] == "all", -c["value"] / c["limit"]))
    height = TOP + ROW * len(cells) + 40
    ticks = "".join(
        f'<text class="grey" x="{x(t):.1f}" y="{height - 14}" text-anchor="middle">{t:g}</text>'
        for t in (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
    )
    rows = "".join(row(cell, TOP + ROW * i) for i, cell in enumerate(cells))
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img"
 aria-label="Total variation by slice: long prompts break, the whole does not">
<style>{STYLE}</style>
<text class="title" x="20" y="32">✗ Do not promote: long prompts break, the whole hides it</text>
<text class="grey" x="20" y="54">mean total variation per token, bfloat16 with rounded
 position ids against float32; bar: 95 % interval, grey: floor, dashed: limit</text>{rows}
{ticks}
</svg>
"""


if __name__ == "__main__":
    source, target = sys.argv[1:]
    Path(target).write_text(ladder(json.loads(Path(source).read_text())), encoding="utf-8")
