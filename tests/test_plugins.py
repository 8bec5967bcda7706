# Plug-ins of installed packages: the templates of examples/plugins, installed by pip and used
# through the command line; and packages that are broken.

import importlib.util
import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from servanda.contract.presets import PRESETS, add_preset, preset_text
from servanda.registry import Registry
from tests import kit

ROOT = Path(__file__).parents[1]
TEMPLATES = ROOT / "examples" / "plugins"
EXAMPLES = sorted((ROOT / "examples").rglob("*.kernelcontract.yaml"))


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder in which pip has installed every template."""
    for module in ("pip", "setuptools"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed: pip install {module}")
    folder = tmp_path_factory.mktemp("plugins")
    copies = shutil.copytree(TEMPLATES, folder / "sources")  # setuptools writes beside them
    site = folder / "site"
    words = [sys.executable, "-m", "pip", "install", "--quiet", "--target", site, "--no-deps"]
    words += ["--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    done = subprocess.run([*words, *copies.iterdir()], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return site


def python(site, *words, folder, env=()):
    """Run Python where the packages of `site` are installed: exit code, output, errors."""
    paths = [str(site), str(ROOT / "src")]
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "COLUMNS": "200", **dict(env)},
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout, done.stderr


def servanda(site, *words, folder, env=()):
    return python(site, "-m", "servanda", *words, folder=folder, env=env)


# the templates, one by one


@pytest.mark.slow
def test_a_metric_is_judged_in_a_contract(site, tmp_path):
    far = kit.moved(kit.BASE, 0.34)  # the first token has a probability of 0.01 instead of 0.35
    more = "  - {id: far, metric: beyond_e, aggregate: mean, at_most: 0.4}"
    path, _ = kit.write(tmp_path, q={"": far}, limit=0.6, more=more)
    golden = kit.golden(tmp_path)
    path.write_text(
        path.read_text().replace(
            "statistical:",
            f"{golden}\nnumerical:\n"
            "  - {id: exact, metric: beyond_e, aggregate: mean, at_most: 0.4}\nstatistical:",
        )
    )

    code, out, err = servanda(site, "check", path, folder=tmp_path)

    assert "runs code: statistical.1.metric runs metric 'beyond_e' of the installed package" in err
    assert code == 0, out + err
    rows = [line.split() for line in out.splitlines() if "beyond_e" in line]
    exact = next(row for row in rows if row[1] == "exact:")
    # of the five tokens only the first is further than a factor of e apart, and infer draws it
    assert abs(math.log(kit.BASE[0] / far[0])) > 1 > abs(math.log(kit.BASE[1] / far[1]))
    assert float(exact[exact.index("all") + 1]) == pytest.approx(far[0], rel=1e-6)
    assert any(row[1] == "far:" for row in rows)
    names = json.loads(servanda(site, "contract", "schema", folder=tmp_path)[1])
    assert "beyond_e" in names["definitions"]["Clause"]["properties"]["metric"]["enum"]
    assert (
        "abs(log ratio) > 1"
        in servanda(site, "contract", "explain", "beyond_e", folder=tmp_path)[1]
    )


def test_a_misspelt_metric_of_a_package_is_hinted_at(site, tmp_path):
    more = "  - {id: far, metric: beyond_ee, aggregate: mean, at_most: 0.4}"
    path, _ = kit.write(tmp_path, more=more)
    code, out, _ = servanda(site, "contract", "lint", path, folder=tmp_path)
    assert code == 2 and "hint: did you mean 'beyond_e'?" in out


def test_no_code_refuses_a_metric_at_its_place_and_does_not_import_it(site, tmp_path):
    more = "  - {id: far, metric: beyond_e, aggregate: mean, at_most: 0.4}"
    path, _ = kit.write(tmp_path, more=more)
    call = f"""
import sys
from servanda.cli.main import main
try:
    main(["contract", "lint", "--no-code", {str(path)!r}])
except SystemExit as stop:
    print(stop.code, "beyond_e" in sys.modules)
"""
    _, out, _ = python(site, "-c", call, folder=tmp_path)

    assert out.splitlines()[-1] == "2 False"
    package = "metric 'beyond_e' of the installed package 'servanda-beyond-e'"
    assert (
        f"{path.name}:18:23: statistical.1.metric runs {package}, and --no-code refuses it" in out
    )


@pytest.mark.slow
def test_a_dump_format_is_detected_and_judged(site, tmp_path):
    dump = tmp_path / "dump"
    dump.mkdir()
    for step in (1, 2):
        row = {"ids": [5, 9, 2, 7], "learn": [0, 1, 1, 1], "prompt": 1}
        rows = [
            row | {"trainer": [0, -1, -2, -0.5 - i / 1e4], "sampler": [0, -1, -2, -0.5]}
            for i in range(40)
        ]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (dump / f"{step}.lab.jsonl").write_text(text)

    for words in ([], ["--as", "lab"]):
        command = ["check", dump, *words]
        code, out, err = servanda(site, *command, folder=tmp_path)
        assert code in (0, 3), out + err
        assert "the lab's trainer" in out and "240 tokens" in out
    with (dump / "2.lab.jsonl").open("a") as file:
        file.write("{}\n")
    code, out, _ = servanda(site, "check", dump, folder=tmp_path)
    assert code == 4
    assert "1 sequence rejected: the line is no sequence: KeyError (first: 2.lab.jsonl:41)" in out
    code, _, err = servanda(site, "check", dump, "--as", "labb", folder=tmp_path)
    assert (code, err) == (2, "there is no dump format 'labb'\n  hint: did you mean 'lab'?\n")


@pytest.mark.slow
def test_a_preset_is_listed_and_compares_two_kernels(site, tmp_path):
    kit.write(tmp_path)
    code, out, _ = servanda(site, "contract", "presets", folder=tmp_path)
    assert (
        code == 0
        and "  lab-int8       int8 weights in the lab's cluster: may the build serve?" in out
    )
    words = ["compare", "table:p.json", "table:q.json", "--preset", "lab-int8"]
    words += ["--prompts", "prompts.jsonl", "--max-new-tokens", "6"]

    code, out, err = servanda(site, *words, folder=tmp_path)

    assert code in (0, 3), out + err
    assert "whole: mean tv" in out and "≤ 0.03" in out


THIN = {  # preset that is changed, its purpose, the change, the call, what is said
    "fp8": (
        "serving",
        ("slices: [depth]", "slices: [all]"),
        ["compare", "table:p.json", "table:q.json", "--prompts", "prompts.jsonl"],
        "no enforced statistical clause with a number as its limit on slices: [depth]",
    ),
    "trl": (
        "reinforcement learning",
        ("metric: tv,", "metric: top1_flip,"),
        ["check", str(ROOT / "examples" / "tiny-dump")],
        "no enforced clause of tv with a number as its limit",
    ),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", THIN)
def test_a_preset_without_the_clauses_that_are_read_is_refused(broken, tmp_path, name):
    purpose, change, words, said = THIN[name]
    text = preset_text(name).replace(f"name: {name}\n", "name: thin\n").replace(*change)
    code = "from servanda.contract.presets import add_preset\n"
    code += f"add_preset('thin', {purpose!r}, {text!r})\n"
    site = broken("thin-presets", "servanda.presets", "thin", "thin_presets", code)
    kit.write(tmp_path)

    code, _, err = servanda(site, *words, "--preset", "thin", folder=tmp_path)

    assert code == 2, err
    assert f"preset 'thin' has {said}\n  hint: " in err
    assert f"servanda contract presets --show {'fp8' if name == 'fp8' else 'verl-sync'}" in err


@pytest.mark.parametrize(
    ("purpose", "line"),
    [
        ("serving", "  name: thin"),
        ("serving", "statistical:"),
        ("serving", "# two lines of comments at the top"),
        ("reinforcement learning", "metric: sampler_fidelity"),
    ],
)
def test_a_preset_in_another_layout_is_refused_with_the_line(purpose, line):
    text = preset_text("trl").replace("name: trl\n", "name: thin\n")
    text = text.replace(line, "").removeprefix("#" * line.startswith("# two"))
    with pytest.raises(ValueError, match=f"preset 'thin' has no line {line!r}: keep the layout of"):
        add_preset("thin", purpose, text)
    assert "thin" not in PRESETS.registered


@pytest.mark.slow
def test_a_notifier_receives_the_decisions_of_a_promotion(site, tmp_path):
    path, _ = kit.write(tmp_path)
    words = ["promote", path, "--ledger", "ledger.db", "--quiet"]

    code, out, err = servanda(site, *words, "--notify", "journal=out.jsonl", folder=tmp_path)

    assert code in (0, 3), out + err
    kinds = [json.loads(line)["kind"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert {*kinds} >= {"route", "notify"}
    for wrong, said in {
        "jurnal=x": "--notify: there is no notifier 'jurnal'\n  hint: did you mean 'journal'?\n",
        "slack=x": "--notify: there is no notifier 'slack'\n  hint: --slack VALUE\n",
        "journal": "--notify takes NAME=VALUE\n"
        "  hint: known: alertmanager, apprise, otlp, journal\n",
        "journal=": "--notify journal=FILE: it names no file\n",
    }.items():
        code, _, err = servanda(site, *words, "--notify", wrong, folder=tmp_path)
        assert (code, err) == (2, said)


@pytest.mark.slow
def test_a_sink_of_a_watch_is_an_option(site, tmp_path):
    words = ["watch", ROOT / "examples" / "tiny-dump", "--once", "--csv", "out.csv"]
    code, out, err = servanda(site, *words, folder=tmp_path)
    assert code == 1, out + err
    rows = [line.split(",") for line in (tmp_path / "out.csv").read_text().splitlines()]
    assert {row[0] for row in rows} == {str(step) for step in range(1, 17)}
    assert all(math.isfinite(float(row[2])) for row in rows if row[2])


@pytest.fixture
def served(site, tmp_path):
    """A real server of one table, as a process; its address."""
    pytest.importorskip("uvicorn")
    kit.write(tmp_path)
    words = ["-m", "servanda", "tools", "serve-kernel", "table:p.json", "--port", "0"]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONUNBUFFERED": "1"}
    server = subprocess.Popen(
        [sys.executable, *words], cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True
    )
    try:
        yield re.search(r"http://\S+", server.stdout.readline())[0]
    finally:
        server.terminate()
        server.wait()
        server.stdout.close()


@pytest.mark.slow
def test_a_dialect_asks_a_server(site, tmp_path, served):
    words = ["compare", "table:p.json", "--prompts", "prompts.jsonl", "--bitwise"]
    words += ["--max-new-tokens", "6"]

    code, out, err = servanda(site, *words, f"{served},dialect=lab", folder=tmp_path)

    assert code in (0, 3), out + err
    (folder,) = (tmp_path / "runs").iterdir()
    contract = folder / "contract.kernelcontract.yaml"
    assert "dialect: lab" in contract.read_text()
    package = "dialect 'lab' of the installed package 'servanda-lab-dialect'"
    code, out, _ = servanda(site, "contract", "lint", contract, folder=tmp_path)
    assert code == 0 and f"runs code: kernels.infer.dialect runs {package}" in out
    code, out, _ = servanda(site, "contract", "lint", "--no-code", contract, folder=tmp_path)
    assert code == 2 and f"kernels.infer.dialect runs {package}, and --no-code refuses it" in out
    contract.write_text(contract.read_text().replace("dialect: lab", "dialect: labb"))
    code, out, _ = servanda(site, "contract", "lint", contract, folder=tmp_path)
    assert code == 2 and "no dialect is named 'labb'" in out and "did you mean 'lab'?" in out
    code, _, err = servanda(site, *words, f"{served},dialect=labb", folder=tmp_path)
    assert code == 2 and "no dialect is named 'labb'\n" in err and "did you mean 'lab'?" in err


@pytest.mark.slow
def test_an_engine_measures_and_is_the_one_of_the_page(site, tmp_path):
    (tmp_path / "ticks.jsonl").write_text('{"prompt": "tick"}\n{"prompt": "tock"}\n')
    words = ["compare", "clock", "clock", "--prompts", "ticks.jsonl", "--bitwise"]
    code, out, err = servanda(site, *words, "--max-new-tokens", "4", folder=tmp_path)
    assert code in (0, 3), out + err

    page = (ROOT / "docs" / "how-to" / "write_an_engine.md").read_text()
    block = re.search(r"```python\n(.*?)```", page, re.S)[1]
    template = (TEMPLATES / "engine" / "clock.py").read_text()
    of_page = block[block.index("class Clock:") : block.index("\nreport = ")].rstrip()
    assert template.rstrip().endswith(of_page)


# what a package may do wrong


@pytest.fixture
def broken(tmp_path):
    """Write an installed package with one entry point, as an installer leaves it."""

    def write(name, group, entry, module, code, site=tmp_path / "broken"):
        info = site / f"{name.replace('-', '_')}-1.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
        (info / "entry_points.txt").write_text(f"[{group}]\n{entry} = {module}\n")
        (site / f"{module}.py").write_text(code)
        return site

    return write


BAD = "  - {id: far, metric: bad_metric, aggregate: mean, at_most: 0.4}"


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("code", "said"),
    [
        (
            "import a_library_that_is_not_there\n",
            "metric 'bad_metric' of the package 'bad-package' cannot be imported: "
            "ModuleNotFoundError: No module named 'a_library_that_is_not_there'\n"
            "  hint: pip install what 'bad_module' needs, or pip uninstall bad-package\n",
        ),
        (
            "",
            "metric 'bad_metric' of the package 'bad-package' is not there: its module "
            "'bad_module' registers no metric 'bad_metric'\n"
            "  hint: its entry point in the group 'servanda.metrics' names a module that does\n",
        ),
    ],
)
def test_a_package_that_fails_is_named(broken, tmp_path, code, said):
    site = broken("bad-package", "servanda.metrics", "bad_metric", "bad_module", code)
    path, _ = kit.write(tmp_path, more=BAD)
    assert servanda(site, "contract", "lint", path, folder=tmp_path) == (4, "", said)
    # and other contracts do not know of it
    path, _ = kit.write(tmp_path)
    assert servanda(site, "contract", "lint", path, folder=tmp_path)[0] == 0


def test_two_packages_with_one_name_are_both_named(broken, tmp_path):
    for name in ("one", "two"):
        site = broken(name, "servanda.metrics", "bad_metric", f"module_of_{name}", "")
    path, _ = kit.write(tmp_path, more=BAD)
    code, _, err = servanda(site, "contract", "lint", path, folder=tmp_path)
    assert (code, err) == (
        4,
        "two installed packages offer the metric 'bad_metric': 'one' and 'two'\n"
        "  hint: uninstall one of them\n",
    )


@pytest.mark.slow
def test_a_package_cannot_replace_what_is_servandas(broken, tmp_path):
    site = broken("bad-package", "servanda.metrics", "tv", "bad_module", "raise SystemExit\n")
    path, _ = kit.write(tmp_path)
    assert servanda(site, "contract", "lint", path, folder=tmp_path)[0] == 0
    names = servanda(site, "contract", "schema", folder=tmp_path)
    assert names[0] == 0


# what it costs those who have none


def test_contracts_without_plug_ins_read_no_metadata_of_packages():
    """It takes as long as reading a contract."""
    code = f"""
import importlib.metadata

def refuse(*, group, **names):
    assert not group.startswith("servanda."), f"entry points were read: {{group}}"
    return ()  # pydantic asks for its own

importlib.metadata.entry_points = refuse
from servanda.cli.main import main
main(["contract", "lint", *{[str(path) for path in EXAMPLES]!r}], standalone_mode=False)
for words in (["lint", "--no-code"], ["explain"]):
    main(["contract", *words, {str(EXAMPLES[0])!r}], standalone_mode=False)
print("read")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.endswith("read\n"), done.stdout + done.stderr


def test_a_registry_without_a_group_has_no_plug_ins():
    things = Registry("thing")
    things.add("a", 1)
    assert things.names() == ("a",) and not things.load("b") and "b" not in things
    with pytest.raises(KeyError):
        things["b"]


def test_a_reserved_name_is_no_plug_in(monkeypatch):
    """A validity check and a metric are both named by `metric:` in a contract."""
    things = Registry("metric", plugins="servanda.metrics")
    others = Registry("guard", aside=things)
    others.add("coherence", 1)
    monkeypatch.setattr("importlib.metadata.entry_points", None)  # calling it would be an error
    assert "coherence" not in things and things.package_of("coherence") is None
    with pytest.raises(KeyError):
        things["coherence"]
