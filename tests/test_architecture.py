# The map of the house, held against the code: imports only go down.

import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from servanda.engines import BUILTIN

SRC = Path(__file__).parents[1] / "src" / "servanda"

# A name is a module or a folder directly under servanda.
FLOORS = (
    {"_version", "errors", "registry"},
    {
        "agreement",
        "bounds",
        "capture",
        "contract",
        "learning",
        "policy",
        "promise",
        "corpus",
        "course",
        "divergence",
        "fields",
        "history",
        "identity",
        "pairing",
        "plain",
        "rewards",
        "rollouts",
        "latency",
        "neutral",
        "sampling",
        "served",
        "split",
        "slices",
        "stats",
        "strict",
        "tables",
        "token_classes",
        "trace",
        "traffic",
        "workload",
    },
    {
        "actions",
        "calibrate",
        "answers",
        "arrivals",
        "bitwise",
        "chain",
        "changes",
        "clauses",
        "columns",
        "contrast",
        "completion",
        "cost",
        "derive",
        "escalation",
        "evidence",
        "explain",
        "falsification",
        "gates",
        "kernel_string",
        "kinds",
        "language",
        "lint",
        "marks",
        "once",
        "plan",
        "breakdown",
        "portrait",
        "power",
        "report",
        "rehearsal",
        "routing",
        "promotion",
        "schedule",
        "schema",
        "scope",
        "slice_choice",
        "slice_coverage",
        "soundness",
        "starter",
        "verdict",
    },
    {
        "admission",
        "drawing",
        "effects",
        "ledger",
        "golden_intervals",
        "engines",
        "faults",
        "foreign",
        "gateway",
        "gathering",
        "golden",
        "importers",
        "invariance",
        "measurement",
        "packing",
        "preflight",
        "presets",
        "probe",
        "rounds",
        "rundir",
        "scoring",
        "sockets",
        "tls",
        "surface",
        "textfile",
        "timing",
    },
    {
        "__main__",
        "cli",
        "comparison",
        "drill",
        "dumps",
        "leader",
        "loading",
        "mutation",
        "promoting",
        "rehearsing",
        "reread",
        "rl",
        "run",
        "selftest",
        "testing",
        "watch",
    },
)
# pure floors: no file, socket, clock, environment, process
IMPURE = {"os", "io", "pathlib", "socket", "subprocess", "tempfile", "time", "datetime", "random"}
PURE_PATHS = {"PurePath"}
HEAVY = {"torch", "transformers", "scipy", "pyarrow", "click", "rich"}
LONGEST = 350


def modules():
    return sorted(p for p in SRC.rglob("*.py"))


def room(path):
    part = path.relative_to(SRC).parts[0]
    return part.removesuffix(".py")


def floor(name):
    return next((i for i, names in enumerate(FLOORS) if name in names), None)


def imports(path):
    """(dotted name, whether at the top of the module) of everything a module imports."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative import"
            names = [node.module]
            if node.module == "servanda":
                names = [f"servanda.{alias.name}" for alias in node.names]
        for name in names:
            yield name, node in tree.body


def own(path):
    """Rooms of the house that a module imports."""
    for name, _ in imports(path):
        if name.startswith("servanda."):
            yield name.split(".")[1]


def test_imports_only_go_down():
    for path in modules():
        here = floor(room(path))
        if room(path) == "__init__":
            continue  # the public names
        assert here is not None, f"{room(path)} is on no floor of the map"
        for name in own(path):
            assert floor(name) is not None, f"{path} imports {name}, which is on no floor"
            assert floor(name) <= here, f"{path} (floor {here}) imports {name} ({floor(name)})"


def test_no_room_needs_itself():
    """Rooms import each other in one direction, so each can be read on its own."""
    graph = {}
    for path in modules():
        if room(path) != "__init__":
            graph.setdefault(room(path), set()).update(n for n in own(path) if n != room(path))
    # a verdict prints itself: the one call upwards, made inside a function
    graph["verdict"].discard("report")
    assert list(TopologicalSorter(graph).static_order())


def test_the_lower_floors_are_pure():
    for path in modules():
        if floor(room(path)) not in (0, 1, 2):
            continue
        text = path.read_text(encoding="utf-8")
        for name, _ in imports(path):
            top = name.split(".")[0]
            allowed = top == "pathlib" and "from pathlib import PurePath\n" in text
            assert top not in IMPURE or allowed, f"{path} imports {name}"
            assert top not in HEAVY, f"{path} imports {name}"


def test_no_module_outgrows_a_sitting():
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in modules()}
    assert {path: n for path, n in lengths.items() if n > LONGEST} == {}


# An engine's own modules begin with these; all others under engines/ are for any of them.
ENGINES = {
    "http": ("http",),
    "llamacpp": ("llamacpp", "llama_", "gguf_"),
    "onnxruntime": ("onnx",),
    "pack": ("pack",),
    "recorded": ("recorded",),
    "table": ("table",),
    "transformers": ("transformers", "quantized"),
    "vllm": ("vllm",),
}


def engine_of(name):
    """The engine that a part of engines/ is of; None of what they share."""
    found = [e for e, begins in ENGINES.items() if name.startswith(begins)]
    assert len(found) <= 1, name
    return found[0] if found else None


def test_every_engine_has_modules_of_its_own():
    assert {module.split(".")[2] for module in BUILTIN.values()} == {*ENGINES}


@pytest.mark.parametrize(
    "path", sorted((SRC / "engines").rglob("*.py")), ids=lambda p: str(p.relative_to(SRC))
)
def test_an_engine_knows_no_other_engine(path):
    """And what they share knows none: engines are opened by name."""
    here = engine_of(path.relative_to(SRC / "engines").parts[0].removesuffix(".py"))
    for name, _ in imports(path):
        if name.startswith("servanda.engines."):
            other = engine_of(name.split(".")[2])
            assert other in (here, None), f"{path} imports {name}"


def test_the_map_for_people_has_every_room():
    text = (SRC.parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d) [a-z, ]+\|(.+)\|$", text, re.MULTILINE)
    shown = {int(n): {r.rstrip("/") for r in re.findall(r"`([^`]+)`", row)} for n, row in rows}
    assert shown == {n: names - {"__main__"} for n, names in enumerate(FLOORS)}
