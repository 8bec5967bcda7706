# What the documents say is true: contracts in them parse, links lead somewhere.

import re
from pathlib import Path

import pytest

from servanda import language
from servanda.divergence import DIVERGENCES
from servanda.engines import engine_names
from servanda.faults import FAULTS
from servanda.slices import FIELDS, OPERATORS

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.M | re.S)
LINK = re.compile(r"\]\(([^)#]+)\)")


def blocks(page, kind):
    return [text for name, text in FENCE.findall(page.read_text(encoding="utf-8")) if name == kind]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_link_leads_to_a_file(page):
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        assert target.startswith("http") or (page.parent / target).exists(), target


def test_the_contract_of_the_readme_is_one():
    contracts = [text for text in blocks(PAGES[0], "yaml") if "apiVersion" in text]
    assert contracts
    for text in contracts:
        language.parse(text, "README.md", engines=engine_names(), faults=[*FAULTS])


def test_the_python_of_the_readme_names_what_is_public():
    import servanda

    (code,) = blocks(PAGES[0], "python")
    for name in re.findall(r"sv\.(\w+)", code):
        assert name in servanda.__all__


def test_the_reference_names_every_metric_field_operator_and_fault():
    page = (ROOT / "docs" / "reference" / "contract.md").read_text(encoding="utf-8")
    for name in [*DIVERGENCES, *FIELDS, *OPERATORS, *FAULTS, *engine_names()]:
        assert f"`{name}`" in page, name


def test_every_example_of_the_readme_is_there():
    for name in re.findall(r"`(tiny-[\w-]+\.kernelcontract\.yaml)`", PAGES[0].read_text()):
        assert (ROOT / "examples" / name).is_file()
