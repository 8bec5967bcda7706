# The site of the documents, without building it: `make docs` builds it, and fails on any link or
# anchor that leads nowhere.

import ast
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from scripts import docs_site

import servanda
from servanda.gateway.controller.web.app import ControllerRoutes, Limits
from servanda.gateway.http.api_keys import RIGHTS, Keys
from servanda.gateway.proxy import completion
from servanda.gateway.proxy.config import OPEN
from tests.transcripts import blocks

ROOT = Path(__file__).parents[1]
NAV = re.findall(r"^ +- (?:[^:\n]+: )?(\S+\.md)$", (ROOT / "mkdocs.yml").read_text("utf-8"), re.M)


def test_every_page_is_in_the_navigation_once():
    pages = [str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md")]
    pages += [str(page.relative_to(ROOT)) for page in (ROOT / "examples").rglob("*.md")]

    assert sorted(NAV) == sorted([*pages, "README.md", "CONTRIBUTING.md", "CHANGELOG.md"])


def test_the_list_of_pages_names_every_page():
    listed = set(docs_site.linked("docs/README.md", (ROOT / "docs/README.md").read_text()))

    pages = {path for path in NAV if path.startswith("docs/")} - {"docs/README.md"}
    assert pages <= listed


def test_no_two_files_have_one_place_in_the_site():
    places = [docs_site.place(path) for path in NAV]
    assert len({*places}) == len(places)


def test_a_page_of_the_site_says_the_version():
    class Config:
        copyright, extra = "", {}

    assert f"Servanda {docs_site.VERSION}" in docs_site.on_config(Config()).copyright


def test_llms_txt_lists_each_page_of_the_navigation_with_its_first_sentence():
    def item(**given):
        return SimpleNamespace(**{"is_section": False, "is_page": False, **given})

    page = item(is_page=True, title="CI", url="ci.html", meta={"description": "Gate it."})
    nav = SimpleNamespace(items=[item(is_section=True, title="Guides", children=[page])])

    assert docs_site.llms(nav).endswith("\n\n## Guides\n\n- [CI](ci.html): Gate it.\n")


@pytest.mark.parametrize(
    "path", sorted((ROOT / "docs/concepts").glob("*.svg")), ids=lambda p: p.stem
)
def test_a_diagram_has_a_title_a_description_and_letters_that_can_be_read(path):
    text = path.read_text("utf-8")

    assert "<title" in text and "\n\n" not in text  # an empty line would end it in a page
    if path.stem != "favicon":
        assert 'role="img"' in text and "<desc" in text
        assert min(map(float, re.findall(r"(?:font:|font-size:)([\d.]+)px", text))) >= 13


def test_lists_begin_behind_an_empty_line_and_code_stays():
    text = "One\n- a\n  b\n- c\n\n```\nx\n- y\n```\n1. d"

    assert docs_site.spaced(text) == "One\n\n- a\n  b\n- c\n\n```\nx\n- y\n```\n\n1. d"


def test_words_and_numbers_of_a_table_stay_whole():
    code = "<td><code>tests/test_that_is_long.py</code></td><td><code>a_short_one</code></td>"
    assert docs_site.cells(code) == (
        "<td><code>tests/<wbr>test_<wbr>that_<wbr>is_<wbr>long.<wbr>py</code></td>"
        "<td class=short><code>a_short_one</code></td>"
    )

    assert "<code>|x|</code>" in docs_site.cells(r"<td><code>\|x\|</code></td>")
    assert docs_site.cells("<td>1.8e-06</td>") == "<td class=short>1.8e-06</td>"
    long = "a text that would be a word wide in a table of many columns"
    assert docs_site.cells(f"<td style=x>{long}</td>") == f"<td style=x class=long>{long}</td>"


def shown(markdown, src="docs/how-to/gateway.md"):
    file = SimpleNamespace(src_uri=src, dest_uri=docs_site.place(src))
    return docs_site.on_page_markdown(markdown, SimpleNamespace(file=file, meta={}))


def test_a_picture_is_shown_in_the_light_of_the_page_and_links_to_itself():
    text = shown("![The page](../gateway_page.png)")

    for when, name in (("only-light", "gateway_page.png"), ("only-dark", "gateway_page_dark.png")):
        img = f'<img src="../{name}" alt="The page">'
        assert f'<a class="{when}" href="../{name}">{img}</a>' in text


def test_a_table_that_is_folded_is_a_table():
    assert shown("<details><summary>All</summary>").startswith('<details markdown="1"><summary>')


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.html", '<link rel="stylesheet" href="https://x.org/a.css">'),
        ("a.html", '<img srcset="a.png, //x.org/a.png 2x">'),
        ("a.html", "<style>@font-face {src: url(https://x.org/a.woff)}</style>"),
        ("a.css", '@import "https://x.org/a.css"'),
        ("a.js", 'import("https://x.org/a.js")'),
        ("a.svg", '<image href="https://x.org/a.png"/>'),
    ],
)
def test_a_file_that_loads_from_elsewhere_fails_the_check(tmp_path, capsys, name, text):
    (tmp_path / "index.html").write_text('<a href="https://x.org">a link loads nothing</a>')
    assert docs_site.main(tmp_path) == 0

    (tmp_path / name).write_text(text)

    assert docs_site.main(tmp_path) == 1
    assert f"{name}: loads " in capsys.readouterr().out


def test_a_page_that_loads_a_file_that_is_not_there_fails_the_check(tmp_path, capsys):
    (tmp_path / "index.html").write_text('<link rel="stylesheet" href="a.css?v=1">')
    assert docs_site.main(tmp_path) == 1
    assert "index.html: a.css is not there" in capsys.readouterr().out

    (tmp_path / "a.css").write_text("")
    assert docs_site.main(tmp_path) == 0


def test_a_site_without_pages_fails_the_check(tmp_path):
    assert docs_site.main(tmp_path) == 1


def test_the_page_of_the_python_api_has_every_public_name_and_no_other():
    page = (ROOT / "docs/reference/python_api.md").read_text("utf-8")

    shown = re.findall(r"^::: (\S+)$", page, re.M)
    public = [f"servanda.{name}" for name in servanda.__all__]
    assert sorted(shown) == sorted([*public, *(f"servanda.rl.{n}" for n in servanda.rl.__all__)])


def section(title):
    page = (ROOT / "docs/reference/gateway_http.md").read_text("utf-8")
    rows = page.partition(f"## {title}\n")[2].partition("\n## ")[0].split("\n\n")
    table = next(block for block in rows if block.startswith("| method and path"))
    for line in table.split("\n")[2:]:
        yield [cell.strip() for cell in line.strip("|").split("|")]


class Silent:
    def status(self):
        raise AssertionError("no one asks")


def test_the_page_of_the_http_api_has_every_route_of_the_controller_with_its_role():
    app = ControllerRoutes(cast(Any, Silent()), Limits(), Keys()).routes()
    routes = {
        f"`{'POST' if 'POST' in route.methods else 'GET'} {route.path}`" for route in app.routes
    }

    listed = {cells[0]: cells[1:3] for cells in section("Routes of the controller")}

    assert {*listed} == routes
    for path, (right, role) in listed.items():
        expected = (f"`{RIGHTS[right.strip('`')][0]}`") if right else "none"
        assert role == expected, path


def test_the_page_of_the_http_api_has_every_path_that_clients_may_ask():
    own = ["GET /healthz", "GET /readyz", "POST /v1/chat/completions", "POST /v1/completions"]

    cells = [cells[0] for cells in section("Routes of the gateway")]

    listed = [path for cell in cells for path in re.findall(r"`([^`]+)`", cell)]
    assert sorted(listed) == sorted([*own, *OPEN])


def test_the_page_of_the_http_api_has_every_code_of_an_error():
    page = (ROOT / "docs/reference/gateway_http.md").read_text("utf-8")
    code = "".join(
        path.read_text("utf-8") for path in (ROOT / "src/servanda/gateway").rglob("*.py")
    )

    words = re.findall(r'ErrorReply\([^()]*(?:\([^()]*\)[^()]*)*?"([a-z_]+)"[,)\s]', code)
    words += [code for _, _, code, _ in completion._NO_REPLY.values()]
    assert len(words) > 12
    for word in words:
        assert f"`{word}`" in page, word


def printed(source):
    """The texts of a module: "..." stands where a value is put in."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            yield "".join(
                str(p.value) if isinstance(p, ast.Constant) else "..." for p in node.values
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_every_message_of_the_page_on_troubles_is_one_that_the_program_prints():
    page = (ROOT / "docs/troubleshooting.md").read_text("utf-8")
    files = (ROOT / "src/servanda").rglob("*.py")
    texts = "\n".join(text for file in files for text in printed(file.read_text("utf-8")))

    messages = blocks(ROOT / "docs/troubleshooting.md", "text")
    assert len(messages) > 12, page
    for message in messages:
        # the names of variables are put in, too
        text = message.replace("SERVANDA_VERL is", "... is")
        parts = [part.strip() for part in text.split("...") if len(part.strip()) > 3]
        for part in parts:
            assert part in texts, part
