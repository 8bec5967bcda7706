# The site of the documents, without building it: `make docs` builds it, and fails on any link or
# anchor that leads nowhere.

import re
from pathlib import Path

import pytest
from scripts import docs_site

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


def test_lists_begin_behind_an_empty_line_and_code_stays():
    text = "One\n- a\n  b\n- c\n\n```\nx\n- y\n```\n1. d"

    assert docs_site.spaced(text) == "One\n\n- a\n  b\n- c\n\n```\nx\n- y\n```\n\n1. d"


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


def test_a_site_without_pages_fails_the_check(tmp_path):
    assert docs_site.main(tmp_path) == 1
