# Writes docs/start/how_many_tokens.svg: samples needed against the true value.
#
#   python scripts/power_curve.py
#
# A test holds the picture in step with the code.

from __future__ import annotations

import re
from pathlib import Path

from servanda.cli.plan import power_picture, sizes
from servanda.judgement.cost import Decides
from servanda.report.html import environment
from servanda.theory.stats.reachable import reach

TARGET = Path(__file__).parents[1] / "docs" / "start" / "how_many_tokens.svg"
LIMIT, ALPHA, CELLS = 0.03, 0.045, 2  # of the tables of the page
PANELS = {"tokens": ("claim realised", 24_576), "prompt groups": ("claim population", 1_024)}
_WIDTH, _LEFT, _TOP, _EACH = 420, 60, 60, 340  # pixels


def curve(units: str, planned: int) -> list[Decides]:
    """What each size decides about a mean tv."""
    points = []
    for n in sizes(planned):
        found = reach(n, LIMIT, alpha=ALPHA, cells=CELLS)
        ends = (found.holds, found.violated, found.holds_even, found.violated_even)
        points.append(Decides("tv", "all", units, n, LIMIT, None, *ends))
    return points


def style(drawn: str) -> str:
    """The colours of a report, and its rules for the classes that a drawing has."""
    css = environment("servanda.report").get_template("page.css").render()
    light, dark, *rest = css.splitlines()
    # rules of a screen of any width
    plain = "\n".join(rest).partition("@media")[0]
    rules = []
    for selectors, body in re.findall(r"([^{}]+)\{([^{}]*)\}", plain):
        kept = [
            one.strip()
            for one in selectors.split(",")
            if re.match(r"\s*(\.|svg text|polyline)", one)
            and all(re.search(rf'[" ]{name}[" ]', drawn) for name in re.findall(r"\.([\w-]+)", one))
        ]
        if kept:
            rules.append(f"{','.join(kept)}{{{body}}}")
    font = "svg{overflow:visible}text{font-family:system-ui,-apple-system,sans-serif}"
    larger = "svg text{font-size:13px}"
    return "\n".join([light, dark, font, *rules, larger, ".page{fill:var(--bg)}"])


def picture() -> str:
    """Both panels, one below the other, on a background of their own."""
    parts, height = [], _EACH * len(PANELS) + 10
    for i, (units, (title, planned)) in enumerate(PANELS.items()):
        top = _EACH * i + _TOP
        drawn = power_picture(curve(units, planned), planned)
        place = f'<svg x="{_LEFT}" y="{top}" width="{_WIDTH - _LEFT - 16}" '
        parts.append(f'<text x="14" y="{top - 34}" class="ink">{title.capitalize()}</text>')
        parts.append(drawn.replace("<svg ", place, 1))
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        f'width="{_WIDTH}" height="{height}" role="img">\n'
        f"<title>Samples needed for a limit of {LIMIT} on the mean tv, by the true value</title>\n"
        f"<style>{style(body)}</style>\n"
        f'<rect class="page" width="{_WIDTH}" height="{height}" rx="6"/>\n{body}\n</svg>\n'
    )


if __name__ == "__main__":
    TARGET.write_text(picture(), encoding="utf-8")
