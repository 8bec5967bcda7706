# What the documents say is true: contracts in them parse, links lead somewhere.

import re
from pathlib import Path
from typing import get_args

import pytest
from pydantic import BaseModel
from scripts import reference

from servanda import language
from servanda.contract import Contract
from servanda.divergence import DIVERGENCES
from servanda.engines import engine_names
from servanda.faults import FAULTS
from servanda.slices import FIELDS, OPERATORS

ROOT = Path(__file__).parents[1]
REFERENCE = ROOT / "docs" / "reference"
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
    pages = ("contract", "metrics", "fields", "faults")
    page = "".join((REFERENCE / f"{name}.md").read_text() for name in pages)
    for name in [*DIVERGENCES, *FIELDS, *OPERATORS, *FAULTS, *engine_names()]:
        assert f"`{name}`" in page, name


@pytest.mark.parametrize("name", [*reference.PAGES])
def test_the_written_pages_are_in_step_with_the_registries(name):
    """python scripts/reference.py writes them again."""
    assert (REFERENCE / name).read_text(encoding="utf-8") == reference.PAGES[name]()


def test_the_reference_names_every_key_of_the_language():
    page = (REFERENCE / "contract.md").read_text(encoding="utf-8")
    for model in models(Contract):
        for key, field in model.model_fields.items():
            word = field.alias or key
            assert re.search(rf"[`.{{ ]{word}[`:,}}. ]", page), f"{model.__name__}.{word}"


def models(annotation):
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
        for field in annotation.model_fields.values():
            yield from models(field.annotation)
    for part in get_args(annotation):
        yield from models(part)


def test_every_example_of_the_readme_is_there():
    for name in re.findall(r"`(tiny-[\w-]+\.kernelcontract\.yaml)`", PAGES[0].read_text()):
        assert (ROOT / "examples" / name).is_file()
