# Engines by name: what is said where the library of one is missing.

import importlib
import re
from importlib.metadata import metadata

import pytest

from servanda.contract.model import Kernel
from servanda.engines import BUILTIN, open_engine
from servanda.engines.base import ENGINES
from servanda.errors import MeasurementError

ENVIRONMENT = (
    "name its environment: `python: .venvs/vllm` in a contract, "
    "`vllm:MODEL@bfloat16,python=.venvs/vllm` on the command line; "
    "docs/how-to/engines.md says how one is made"
)
HINTS = {
    "llamacpp": "pip install 'servanda[llamacpp]'",
    "onnxruntime": "pip install 'servanda[onnx,transformers]'",
    "transformers": "pip install 'servanda[transformers]'",
    "vllm": ENVIRONMENT,
}


@pytest.fixture
def nothing_else(monkeypatch):
    """An interpreter in which no engine can be imported."""

    def missing(name):
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(ENGINES, "_things", {})
    monkeypatch.setattr(importlib, "import_module", missing)


@pytest.mark.parametrize("name", BUILTIN)
def test_a_missing_library_is_said_with_what_to_do(nothing_else, name):
    with pytest.raises(MeasurementError) as said:
        open_engine(Kernel(engine=name, model="m"))

    hint = HINTS.get(name, "install it beside servanda, or name its `python:`")
    assert str(said.value) == (
        f"engine {name!r} cannot be imported: No module named {BUILTIN[name]!r}\n  hint: {hint}"
    )


def test_hints_name_extras_that_there_are():
    named = {e for hint in HINTS.values() for e in re.findall(r"servanda\[(.+)\]", hint)}
    extras = set(metadata("servanda").get_all("Provides-Extra") or ())
    assert {extra for names in named for extra in names.split(",")} <= extras
