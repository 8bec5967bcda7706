# The public names, and what importing them costs.

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import servanda

NAMES = [
    "Contract",
    "ContractError",
    "Evidence",
    "EvidenceError",
    "IdentityError",
    "MeasurementError",
    "Plan",
    "ServandaError",
    "Verdict",
    "advance",
    "check",
    "compile",
    "judge",
    "load",
    "measure",
    "pair",
    "rl",
    "weigh",
]


def test_the_public_names_are_these_and_sorted():
    assert servanda.__all__ == NAMES == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_is_there_and_says_what_it_is(name):
    found = getattr(servanda, name)
    assert found.__doc__ or found.__all__  # a package says it name by name


def test_the_doors_for_trainers_are_these_and_each_says_what_it_is():
    names = ["DraftCounts", "DraftMeter", "Follow"]
    names += ["Monitor", "Step", "Stream", "Trainee", "preflight", "read_state"]
    assert servanda.rl.__all__ == names
    pytest.importorskip("torch")
    assert all(getattr(servanda.rl, name).__doc__ for name in servanda.rl.__all__)


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'chek'"):
        servanda.chek  # noqa: B018


def loaded(statement):
    code = f"{statement}\nimport sys, json\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_import_servanda_costs_no_heavy_library():
    modules = loaded("import servanda")
    assert not modules & {
        "torch",
        "transformers",
        "scipy",
        "pyarrow",
        "rich",
        "click",
        "numpy",
        "jinja2",
    }


def test_a_contract_is_read_without_torch_or_scipy():
    modules = loaded("import servanda; servanda.load; servanda.judge; servanda.Verdict")
    assert not modules & {"torch", "transformers", "scipy", "scipy.stats", "rich", "jinja2"}


MEASURING = {"pyarrow", "servanda.engines.worker", "servanda.runner.sequential"}
PRINTING = {"rich", "jinja2", "xml.etree.ElementTree", "servanda.report.html"}


def test_all_names_cost_no_library_of_measuring_or_printing_and_build_no_validator():
    """A validator of pydantic looks for plug-ins in the metadata of every installed package."""
    modules = loaded("from servanda import *")
    heavy = {"torch", "transformers", "scipy", "click", "ruamel.yaml", "difflib"}
    assert {"numpy", "pydantic", "servanda.promotion.api", "servanda.runner.run"} < modules
    assert not modules & (heavy | MEASURING | PRINTING | {"pydantic.plugin._loader"})


def test_help_loads_no_command_and_no_number():
    modules = loaded("from servanda.cli.main import main; main(['--help'], standalone_mode=False)")
    ours = {m for m in modules if m.startswith("servanda.cli.")}
    assert ours == {"servanda.cli.commands", "servanda.cli.main"}
    assert not modules & {"numpy", "pydantic", "torch", "difflib", "importlib.metadata"}


# rooms in which only these modules may need the library of an extra to be imported
BASE = "cli contract traces theory judgement report runner authoring promotion gateway.controller"
WITH_EXTRAS = re.compile(
    r"cli\.serve|cli\.serve_processes|.*\.postgres(_store)?"
    r"|gateway\.controller\.(process|supervisor|web\.(app|auth|metrics))"
)


def test_a_command_needs_no_library_of_an_extra_to_begin():
    """A user without the extra gets its hint, and what needs no extra works."""
    extras = "aiohttp apprise grpc httptools llama_cpp onnxruntime opentelemetry pandas peft "
    extras += "prometheus_client psycopg ray safetensors starlette tokenizers torch transformers "
    extras += "triton uvicorn uvloop"
    root = Path(servanda.__file__).parent
    names = [
        ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        for room in BASE.split()
        for path in (root / room.replace(".", "/")).rglob("*.py")
    ]
    names = [name for name in names if not WITH_EXTRAS.fullmatch(name)]
    assert len(names) > 250
    code = f"""
import importlib, sys
sys.modules.update(dict.fromkeys({extras.split()!r}))
for name in {names!r}:
    importlib.import_module("servanda." + name)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-800:]


def test_lint_costs_no_library_of_measuring_or_printing():
    contract = Path(__file__).parents[1] / "examples" / "tiny-bf16.kernelcontract.yaml"
    modules = loaded(
        "from servanda.cli.main import main\n"
        f"main(['contract', 'lint', {str(contract)!r}], standalone_mode=False)"
    )
    assert "servanda.judgement.lint.linter" in modules
    assert not modules & (MEASURING | PRINTING | {"torch", "transformers", "scipy"})


@pytest.mark.slow
def test_a_verdict_knows_its_forms_and_loads_them_only_when_one_is_asked_for():
    """Judgement lies below the reports, so the registry of formats fetches them by name."""
    importing = "from servanda.judgement.verdict import FORMATS"
    assert "servanda.report" not in loaded(importing)
    for asking in ("FORMATS['text']", "sorted(FORMATS)", "'json' in FORMATS", "len(FORMATS)"):
        assert "servanda.report.text" in loaded(f"{importing}\n{asking}")
