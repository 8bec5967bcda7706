# Every page that a person reads, in Chromium: the site of docs/, the reports, the promotion page
# and the gateway's page, on three widths, in light and in dark.
#
# No page may complain on the console, ask another host for anything, or scroll sideways; axe-core
# may find nothing serious.  `make test-pages` installs what this needs: SERVANDA_VENVS names the
# folder with `docs`, the environment that builds the site, and `axe`, which has axe-core.

import asyncio
import contextlib
import functools
import http.server
import json
import os
import re
import subprocess
import threading
from pathlib import Path

import pytest
from click.testing import CliRunner

from servanda.cli.main import main
from servanda.judgement.verdict import FORMATS
from tests.gateway.controller.web import chromium, fake
from tests.gateway.controller.web.serving import KEY, live
from tests.report.test_page import VERDICTS
from tests.slow.test_pictures import PAGES

ROOT = Path(__file__).parents[2]
VENVS = Path(os.environ.get("SERVANDA_VENVS", ROOT / ".venvs")).absolute()
AXE = VENVS / "axe" / "axe_playwright_python" / "axe.min.js"
WIDTHS = (1280, 800, 390)
LIGHTS = (False, True)
# axe needs most of the time, and what it looks for differs little between widths
AXE_AT = {(1280, False), (390, True)}
WAIT_S = 600  # axe takes seconds for a long page, and other tests have the processors too
PAGES_A_BROWSER = 12
# reports with every part that a report can have, in which nothing is known, or much
SHOWN = ("holds", "error", "with pictures", "stable", "hostile", "golden only")
SHOWN += ("nothing measured", "number format")

# what a page does in motion is no finding, and all that is folded is unfolded
SETTLED = """(async () => {
  const still = new CSSStyleSheet();
  still.replaceSync("*, ::before, ::after { transition: none !important; animation: none !important }");
  document.adoptedStyleSheets.push(still);
  for (const one of document.querySelectorAll("main details, article details")) one.open = true;
  await document.fonts.ready;
})()"""  # noqa: E501
DRAWN = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
# a page in the other light, a page too wide, boxes beyond it that none of their own scrolls into
# view, pictures that are not there, Markdown that was taken for text
FOUND = """(() => {
  const width = WIDTH, dark = Boolean(DARK), found = [];
  const paper = getComputedStyle(document.body).backgroundColor.match(/[\\d.]+/g).map(Number);
  if ((paper[0] + paper[1] + paper[2] < 382) !== dark) found.push(`the page is of colour ${paper}`);
  const seen = (one) => {
    for (; one && one !== document.body; one = one.parentElement) {
      const style = getComputedStyle(one);
      if (["auto", "scroll"].includes(style.overflowX)) return false;
      if (style.position === "fixed" || style.clipPath !== "none") return false;
    }
    return true;
  };
  if (document.documentElement.scrollWidth > width)
    found.push(`the page is ${document.documentElement.scrollWidth} wide`);
  for (const one of document.querySelectorAll("main *, article *")) {
    const box = one.getBoundingClientRect();
    if (box.width && box.right > width + 1 && one.checkVisibility({visibilityProperty: true})
        && seen(one)) {
      found.push(`ends at ${Math.round(box.right)}: ${one.outerHTML.slice(0, 90)}`);
      break;
    }
  }
  for (const one of document.querySelectorAll("img"))
    if (one.checkVisibility() && !(one.complete && one.naturalWidth))
      found.push(`no picture: ${one.outerHTML}`);
  for (const one of document.querySelectorAll("article :is(p, li, td, details)")) {
    const own = [...one.childNodes].filter((node) => node.nodeType === Node.TEXT_NODE);
    const raw = own.find((node) => /\\|-{3}|\\*\\*\\w|\\]\\(|^>>> /.test(node.textContent));
    if (raw) found.push(`not read as Markdown: ${raw.textContent.slice(0, 60)}`);
  }
  return found;
})()"""
FOUND_BY_AXE = """(async () => {
  const found = await axe.run(document, {resultTypes: ["violations"], preload: false});
  return found.violations.filter((one) => ["serious", "critical"].includes(one.impact))
    .map((one) => `axe ${one.id}, ${one.nodes.length}: ` + one.nodes.slice(0, 3)
      .map((n) => n.target.join(" ") + " " + (n.any[0]?.message ?? "").slice(0, 140)).join("; "));
})()"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site of docs/, built from this checkout."""
    python = VENVS / "docs" / "bin" / "python"
    if not python.exists():
        pytest.skip(f"{python} is not there: make test-pages")
    made = tmp_path_factory.mktemp("site")
    command = [python, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", made]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, check=True)
    return made


@pytest.fixture(scope="module")
def axe():
    chromium.binary()
    if not AXE.exists():
        pytest.skip(f"{AXE} is not there: make test-pages")
    return AXE.read_text(encoding="utf-8")


@contextlib.contextmanager
def served(folder):
    """The address of a folder."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    handler = functools.partial(Handler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


async def problems(tab, url, dark, axe, key=None):
    """What is wrong with a page in one light: a line for each finding, with its width."""
    found = []
    tab.events.clear()
    await tab.ask("Network.enable")
    await tab.open(url, key, width=1000, dark=dark)
    await tab.js(SETTLED)
    await tab.ask("Runtime.evaluate", expression=axe)
    for width in WIDTHS:
        await tab.look(width, 900, dark)
        await tab.js(DRAWN)
        told = await tab.js(FOUND.replace("WIDTH", str(width)).replace("DARK", str(int(dark))))
        if (width, dark) in AXE_AT:
            told += await tab.js(FOUND_BY_AXE)
        found += [f"{width}: {one}" for one in told]
    found += [f"console: {json.dumps(one)}" for one in tab.complaints()]
    own = url.rpartition("/")[0] if url.startswith("file:") else _host(url)
    for event in tab.events:
        asked = event["params"].get("request", {}).get("url", "")
        if asked and not asked.startswith((own, "data:", "blob:")):
            found.append(f"asks {asked}")
    return [f"{url} in the {'dark' if dark else 'light'}, {one}" for one in found]


def _host(url):
    found = re.match(r"\w+://[^/]+/", url)
    assert found, url
    return found[0]


def look_at(urls, axe, key=None):
    """All that is wrong with the pages: a line for each finding."""

    async def looked(some, dark):
        # the site remembers the light of the first visit, so each light has a browser of its own
        async with chromium.tab(wait_s=WAIT_S) as tab:
            return [one for url in some for one in await problems(tab, url, dark, axe, key)]

    parts = [urls[i : i + PAGES_A_BROWSER] for i in range(0, len(urls), PAGES_A_BROWSER)]
    found = [asyncio.run(looked(some, dark)) for some in parts for dark in LIGHTS]
    return "\n".join(one for part in found for one in part)


def test_every_page_of_the_site_can_be_read(site, axe):
    names = sorted(str(one.relative_to(site)) for one in site.rglob("*.html"))
    assert len(names) > 80
    with served(site) as root:
        assert look_at([root + name for name in names], axe) == ""


def test_the_menu_and_the_search_of_a_phone_can_be_used(site, axe):
    async def looked(url):
        async with chromium.tab(wait_s=WAIT_S) as tab:
            await tab.open(url, width=390, dark=True)
            await tab.js(SETTLED)
            await tab.ask("Runtime.evaluate", expression=axe)
            await tab.click(".md-header label[for=__drawer]")
            await tab.until("document.querySelector('#__drawer').checked")
            found = await tab.js(FOUND_BY_AXE)

            await tab.js("document.querySelector('#__drawer').click()")
            await tab.click(".md-header label[for=__search]")
            await tab.until("document.activeElement.matches('.md-search__input')")
            await tab.type("noise floor")
            await tab.press("End", 35)  # it looks at keys
            await tab.until("document.querySelectorAll('.md-search-result__item').length")
            return found + await tab.js(FOUND_BY_AXE) + tab.complaints()

    with served(site) as root:
        assert asyncio.run(looked(f"{root}index.html")) == []


def test_every_report_can_be_read(tmp_path, axe):
    for name in SHOWN:
        page = FORMATS["html"](VERDICTS[name])
        (tmp_path / f"{name}.html").write_text(page, encoding="utf-8")
    dump = ["check", str(ROOT / "examples/tiny-dump"), "--report", str(tmp_path / "dump.html")]
    done = CliRunner().invoke(main, dump)
    assert done.exit_code == 1, done.output

    assert look_at([one.as_uri() for one in sorted(tmp_path.glob("*.html"))], axe) == ""


def test_pages_of_many_pictures_can_be_read(tmp_path, axe):
    """Promotions, a preflight test, a plan and a report, each with more than fits a line."""
    for page in PAGES:
        folder = tmp_path / page.__name__
        folder.mkdir()
        (tmp_path / f"{page.__name__}.html").write_text(page(folder), encoding="utf-8")

    assert look_at([one.as_uri() for one in sorted(tmp_path.glob("*.html"))], axe) == ""


@pytest.mark.parametrize("role", ["operator", "viewer"])
def test_the_page_of_the_gateway_can_be_read(axe, role):
    with live(fake.Controller()) as client:
        assert look_at([f"{client.base_url}/"], axe, KEY[role]) == ""
