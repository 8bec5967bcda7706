"""Pictures in a real browser: they fit a phone, and their letters can be read."""

import asyncio
from dataclasses import replace

import pytest

from servanda.cli.plan import plan_page
from servanda.judgement.breakdown import EValuePath
from servanda.judgement.cost import cost_of
from servanda.judgement.verdict import FORMATS
from servanda.rl.sync_drill.report import page
from servanda.runner import run
from tests import kit
from tests.gateway.controller.web import chromium
from tests.report import made
from tests.rl.sync_drill.test_grid import norms, response, result

_SMALL = "[...document.querySelectorAll('svg text, td, th')].filter(one => \
parseFloat(getComputedStyle(one).fontSize) < 12).length"
_OUTSIDE = "[...document.querySelectorAll('svg text')].filter(one => { \
const box = one.getBoundingClientRect(); return box.right > innerWidth + 1 || box.left < -1; }\
).map(one => one.textContent)"
# labels of one picture that lie on each other, but for their line spacing
_TOUCHING = """[...document.querySelectorAll('svg')].flatMap(svg => {
  const boxes = [...svg.querySelectorAll(':scope > text')].map(
    one => [one.textContent, one.getBoundingClientRect()]);
  return boxes.flatMap(([name, a], i) => boxes.slice(i + 1).filter(([, b]) =>
    a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 3 && b.top < a.bottom - 3
  ).map(([other]) => name + ' / ' + other));
})"""


def wide_grid(_):
    classes = ("input_layernorm", "post_attention_layernorm", "q_norm", "k_norm")
    groups = [norms(f"norms.{name}", *[1.0] * 36) for name in classes]
    groups += [response(f"layers.{i}.attn", "attn", i, follow=i % 2) for i in range(36)]
    return page(result(response("embed/lm_head", "tied"), *groups))


def plan(folder):
    path, _ = kit.write(folder)
    made = run.compile(run.load(path))
    return plan_page(made, cost_of(made))


def evaluations(_):
    n = tuple(range(64, 833, 64))
    path = EValuePath("tv", "all", n, tuple(0.4 * i for i in n), tuple(-0.1 * i for i in n))
    whole = made.VERDICTS["violated"]
    return FORMATS["html"](
        replace(whole, circumstances=replace(whole.circumstances, e_values=(path,)))
    )


PAGES = (wide_grid, plan, evaluations)


@pytest.mark.parametrize("page", PAGES, ids=lambda f: f.__name__)
def test_a_page_with_pictures_fits_and_can_be_read(page, tmp_path):
    chromium.binary()
    path = tmp_path / "page.html"
    path.write_text(page(tmp_path), encoding="utf-8")

    async def looked():
        for width in (1280, 390):
            for dark in (False, True):
                async with chromium.tab() as tab:
                    await tab.open(path.as_uri(), width=width, dark=dark)
                    assert await tab.js("document.documentElement.scrollWidth") <= width
                    assert await tab.js(_SMALL) == 0
                    assert await tab.js(_OUTSIDE) == await tab.js(_TOUCHING) == []
                    assert tab.complaints() == []

    asyncio.run(looked())
