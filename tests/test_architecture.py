# The map of the house, held against the code: imports only go down, and kinds of clauses answer for
# themselves.

import ast
import re
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from servanda.engines import BUILTIN

SRC = Path(__file__).parents[1] / "src" / "servanda"

# A room imports the floors below it; rooms of one floor ignore each other.
FLOORS = (
    {"_version", "errors", "registry"},
    {"theory", "traces"},
    {"contract"},
    {"judgement"},
    {"engines", "report"},
    {"runner"},
    {"promotion"},
    {"authoring", "gateway", "rl"},
    {"cli"},
)
# of the lowest floor: a plug-in that cannot be imported is an error of the tree
BESIDE = {("registry", "errors")}
FACES = {"__init__", "__main__", "pytest_plugin"}  # public names, `python -m servanda`, pytest

# No file, socket, clock, environment or process; what is below a name here, but for the names
# with a minus.
PURE = {
    "_version",
    "errors",
    "registry",
    *("theory", "-theory.divergence.row_sums"),
    "traces",
    "judgement",
    "report",
    *("contract", "-contract.presets", "-contract.text_file"),
    *("authoring", "-authoring.fault_injection", "-authoring.contract_test.files"),
    *("promotion", "-promotion.run", "-promotion.ledger", "-promotion.sql", "-promotion.notify"),
    "gateway.routing",
    "rl.dumps.checks",
}
IMPURE = {"os", "io", "pathlib", "socket", "subprocess", "tempfile", "time", "datetime", "random"}
HEAVY = {"torch", "triton", "transformers", "scipy", "pyarrow", "click", "rich"}

CHAIN = 20  # modules, of which each imports the next at its top
# names that three files or more may share, for they mean one thing
SHARED = {
    "app": "the routes of an HTTP server",
    "base": "what each thing of a registry is",
    "contract": "the contract that something here is held to",
    "format": "values as people read them",
    "judge": "verdicts on evidence of one kind",
    "ledger": "what was decided, append-only",
    "model": "the frozen values of a language or of a state machine",
    "plan": "what will be done, before it is",
    "report": "results as people read them",
    "run": "something done from its start to its end",
    "state": "what a state machine remembers",
}
# established nouns and adjectives of the field
NOUNS = {
    *("authoring", "finding", "kernel_string", "padding"),
    *("recorded", "rescoring", "rounding", "routing", "sampling"),
}


def modules():
    return sorted(p for p in SRC.rglob("*.py"))


def dotted(path):
    """A module as its imports name it, without `servanda`; a package by its folder."""
    parts = path.relative_to(SRC).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def room(name):
    return name.partition(".")[0]


def floor(name):
    return next((i for i, names in enumerate(FLOORS) if room(name) in names), None)


@cache
def nodes_of(path):
    """All nodes of a module, and those at its top."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [*ast.walk(tree)], tree.body


@cache
def imports(path):
    """(dotted name, whether at the top of the module) of everything a module imports."""
    every, top = nodes_of(path)
    found = []
    for node in every:
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative import"
            # of a package a module, or a name of its own
            inside = SRC.parent.joinpath(*node.module.split("."))
            names = [
                f"{node.module}.{alias.name}"
                if node.module == "servanda"
                or (inside / alias.name).is_dir()
                or (inside / f"{alias.name}.py").is_file()
                else node.module
                for alias in node.names
            ]
        found += [(name, node in top) for name in names]
    return found


def own(path):
    """Modules of the house that a module imports."""
    for name, _ in imports(path):
        if name.startswith("servanda."):
            yield name.removeprefix("servanda.")


def test_imports_only_go_down():
    for path in modules():
        here = dotted(path)
        if here in FACES:
            continue
        assert floor(here) is not None, f"{here} is on no floor of the map"
        for name in own(path):
            assert floor(name) is not None, f"{here} imports {name}, which is on no floor"
            down = room(name) == room(here) or floor(name) < floor(here)
            assert down or (here, name) in BESIDE, f"{here} imports {name}"


def sub_room(name):
    """The folder of a room in which a module lies; the room itself for those in none."""
    parts = name.split(".")
    folder = SRC.joinpath(*parts[:2])
    return ".".join(parts[:2]) if folder.is_dir() else parts[0]


def test_no_room_within_a_room_needs_itself():
    """Rooms within a room import each other in one direction, so each can be read on its own."""
    graph = {}
    for path in modules():
        here = sub_room(dotted(path))
        there = {sub_room(name) for name in own(path) if room(name) == room(here)}
        if path.name != "__init__.py" or here != room(here):  # the face of a room knows all of it
            graph.setdefault(here, set()).update(there - {here})
    assert list(TopologicalSorter(graph).static_order())


def test_no_chain_of_imports_is_long():
    """From any module to the floor; what is imported for the type checker alone is no link."""
    graph = {
        dotted(path): {name.removeprefix("servanda.") for name, at_top in imports(path) if at_top}
        for path in modules()
    }
    graph = {name: links & graph.keys() for name, links in graph.items()}
    chains = {}
    for name in TopologicalSorter(graph).static_order():
        below = max((chains[link] for link in sorted(graph[name])), key=len, default=())
        chains[name] = (name, *below)
    chain = max(chains.values(), key=len)
    assert len(chain) <= CHAIN, f"{len(chain)} modules: {' > '.join(chain)}"


def pure(name):
    """Whether the nearest name above a module, or its own, is said to be pure."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        above = ".".join(parts[:end])
        if above in PURE or f"-{above}" in PURE:
            return above in PURE
    return False


def test_what_is_said_to_be_pure_is():
    assert {one.lstrip("-") for one in PURE} <= {dotted(path) for path in modules()}
    for path in filter(lambda path: pure(dotted(path)), modules()):
        text = path.read_text(encoding="utf-8")
        for name, _ in imports(path):
            top = name.split(".")[0]
            allowed = top == "pathlib" and "from pathlib import PurePath\n" in text
            assert top not in IMPURE or allowed, f"{path} imports {name}"
            assert top not in HEAVY, f"{path} imports {name}"


def stems():
    """Names of modules and of packages, each with where it stands."""
    found = {}
    for path in modules():
        name = dotted(path)
        if name not in FACES and path.stem != "__main__":
            found.setdefault(name.rpartition(".")[2], set()).add(name)
    return found


def test_a_name_means_one_thing():
    often = {stem: sorted(places) for stem, places in stems().items() if len(places) > 2}
    assert often.keys() == SHARED.keys(), often


def test_files_are_named_by_nouns():
    """What a file holds, not what is done: no gerund and no participle but a noun of the field."""
    assert {stem for stem in stems() if stem.endswith(("ing", "ed"))} == NOUNS


# An engine's own modules begin with these; all others under engines/ are for any of them.
ENGINES = {
    "http": ("http",),
    "llamacpp": ("llamacpp", "llama_"),
    "onnxruntime": ("onnx",),
    "recorded": ("recorded",),
    "table": ("table",),
    "transformers": ("transformers", "low_precision"),
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
    rows = re.findall(r"^\| (\d) \| `(\w+)/` \|", text, re.MULTILINE)
    rooms = {(i, name) for i, names in enumerate(FLOORS) for name in names if i}
    assert {(int(n), name) for n, name in rows} == rooms


def name_of(node):
    """The last part of a dotted name."""
    return getattr(node, "attr", getattr(node, "id", None))


def asks(node, kinds):
    """Whether a node asks for the class of a kind: by a call, by `match`, or by its type."""
    match node:
        case ast.Call(func=ast.Name("isinstance" | "issubclass"), args=[_, wanted]):
            return not kinds.isdisjoint(map(name_of, ast.walk(wanted)))
        case ast.Call(func=ast.Name("type"), args=[of]) | ast.Attribute(of, "__class__"):
            return name_of(of) == "kind"
        case ast.MatchClass(cls=wanted):
            return name_of(wanted) in kinds
    return False


def reads(node):
    """Whether a node compares a note, or looks for a text in it."""
    match node:
        case ast.Compare(left=left, comparators=others):
            return any(getattr(part, "attr", "") == "note" for part in (left, *others))
        case ast.Call(func=ast.Attribute(ast.Attribute(attr="note"), method)):
            return method in ("startswith", "endswith", "find", "index", "count")
    return False


def test_kinds_answer_for_themselves_and_nothing_is_decided_by_a_note():
    nodes = {path.relative_to(SRC).as_posix(): nodes_of(path)[0] for path in modules()}
    every = [node for of in nodes.values() for node in of]
    bases = {n.name: {*map(name_of, n.bases)} for n in every if isinstance(n, ast.ClassDef)}
    kinds = {"Kind"}
    while more := {name for name, above in bases.items() if above & kinds} - kinds:
        kinds |= more
    rooms = {name: of for name, of in nodes.items() if not name.startswith("judgement/clauses/")}
    assert {name for name, of in rooms.items() if any(asks(node, kinds) for node in of)} == set()
    assert [name for name, of in nodes.items() if any(map(reads, of))] == []
