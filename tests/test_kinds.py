# Kinds answer for themselves: no other room asks of which class one is, and none reads a note.

import ast
from pathlib import Path

SRC = Path(__file__).parents[1] / "src" / "servanda"
# modules that still ask; the list only shrinks
ASK = {"rl/dumps/judge.py", "rl/dumps/step_verdicts.py", "rl/dumps/window.py"}


def trees():
    for path in sorted(SRC.rglob("*.py")):
        yield path.relative_to(SRC).as_posix(), ast.parse(path.read_text(encoding="utf-8"))


def name_of(node):
    """The last part of a dotted name."""
    return getattr(node, "attr", getattr(node, "id", None))


def kinds():
    """Names of all classes that derive from `Kind`."""
    bases = {
        node.name: {name_of(base) for base in node.bases}
        for _, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    found = {"Kind"}
    while more := {name for name, above in bases.items() if above & found} - found:
        found |= more
    return found


def asks(tree, classes):
    """The lines that ask for the class of a kind: by a call, by `match`, or by its type."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name("isinstance" | "issubclass"), args=[_, wanted]):
                if {name_of(part) for part in ast.walk(wanted)} & classes:
                    yield node.lineno
            case ast.Call(func=ast.Name("type"), args=[of]) if name_of(of) == "kind":
                yield node.lineno
            case ast.Attribute(attr="__class__", value=of) if name_of(of) == "kind":
                yield node.lineno
            case ast.MatchClass(cls=wanted) if name_of(wanted) in classes:
                yield node.lineno


def reads(tree):
    """The lines that compare a note, or look for a text in it."""
    for node in ast.walk(tree):
        match node:
            case ast.Compare(left=left, ops=ops, comparators=others):
                about = [getattr(part, "attr", None) for part in (left, *others)]
                if "note" in about and not all(isinstance(op, ast.Is | ast.IsNot) for op in ops):
                    yield node.lineno
            case ast.Call(func=ast.Attribute(ast.Attribute(attr="note"), method)):
                if method in ("startswith", "endswith", "find", "index", "count"):
                    yield node.lineno


def test_only_clauses_ask_for_the_class_of_a_kind():
    classes = kinds()
    assert {"Certificate", "RewardGap", "NotHere", "CornerFact"} <= classes
    asking = {
        name: lines
        for name, tree in trees()
        if not name.startswith("judgement/clauses/") and (lines := [*asks(tree, classes)])
    }
    assert {name: lines for name, lines in asking.items() if name not in ASK} == {}
    assert {*asking} == ASK, "asks no longer: take it from the list"


def test_no_decision_is_by_the_text_of_a_note():
    assert {name: lines for name, tree in trees() if (lines := [*reads(tree)])} == {}


def test_every_way_to_ask_is_found():
    code = """
isinstance(cell.kind, Fact | Certificate)
issubclass(GUARDS[name], (A, clauses.Certificate))
type(cell.kind) is Certificate
match kind:
    case Certificate():
        pass
isinstance(kind, str)
"""
    assert sorted(asks(ast.parse(code), {"Certificate"})) == [2, 3, 4, 6]
    notes = 'c.note == TEXT\n"x" in c.note\nc.note.startswith("x")\nif c.note: f(note=c.note)\n'
    assert sorted(reads(ast.parse(notes))) == [1, 2, 3]
