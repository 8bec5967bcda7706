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
    "onnxruntime": "pip install 'servanda[onnx]'",
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


CACHE, OPTION = {"kv_cache": "fp8_e4m4"}, {"options": {"block_sise": 16}}


@pytest.mark.parametrize(
    ("asked", "has", "known", "message", "hint"),
    [
        (CACHE, "kv_caches", (), "has no choice of its KV cache", "it is for llamacpp, transf"),
        (CACHE, "kv_caches", ("fp8", "fp8_e4m3"), "no KV cache of type 'fp8_e4m4'", "fp8_e4m3"),
        (OPTION, "options", (), "takes no options: block_sise", "remove kernels.*.options"),
        (OPTION, "options", ("block_size",), "no option 'block_sise'", "did you mean 'block_size'"),
    ],
)
def test_what_an_engine_does_not_have_is_refused(monkeypatch, asked, has, known, message, hint):
    monkeypatch.setattr(ENGINES, "_things", {"odd": type("Odd", (), {has: known})})
    with pytest.raises(MeasurementError, match=message) as error:
        open_engine(Kernel(engine="odd", model="none", **asked))
    assert hint in str(error.value)


def test_an_engine_that_does_not_speculate_names_what_does():
    options = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}
    with pytest.raises(MeasurementError) as error:
        open_engine(Kernel(engine="table", model="none", options=options))
    assert str(error.value) == (
        "engine 'table' does not speculate\n"
        "  hint: remove options.speculative_config; measure a server that speculates by its URL, "
        "or engine vllm with this option"
    )
