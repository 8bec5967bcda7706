# A contract written anew: the named scalars change, and not one other character.

import re

import pytest

from servanda.authoring.calibrate.rewrite import rewritten
from servanda.contract.yaml_reader import read
from servanda.errors import ContractError

TEXT = """\
# limits of last week   # and their reasons
metadata: {name: "x", title: 'at_most: 0.02'}   # a text, not a limit
kernels: {reference: {model: ../p.json}, candidate: {model: "q 1.json"}}
statistical:
  - {id: tv, metric: tv, aggregate: mean, at_most: 2e-2}    # because 0.02 was seen
  - id: tail
    at_most:    .2   # block style, and odd blanks\t
    metric: "abs_log_ratio_nats"
  # a comment between
  - {id: k3, at_most: 0.0010, clip: 1.0}
runtime: {clauses: [{id: ttft, at_most: 3}]}
"""
PLACES = {
    ("statistical", 0, "at_most"): ("2e-2", "0.013"),
    ("statistical", 1, "at_most"): (".2", "0.5"),
    ("statistical", 2, "at_most"): ("0.0010", "1e-05"),
    ("runtime", "clauses", 0, "at_most"): ("3", "12"),
    ("kernels", "train", "model"): ("../p.json", "a/b.json"),
    ("kernels", "infer", "model"): ('"q 1.json"', '"../q 1.json"'),
}


def test_every_other_character_stays():
    found = rewritten(TEXT, {place: new for place, (_, new) in PLACES.items()})

    undone = found
    for old, new in PLACES.values():
        undone, times = re.subn(rf"(?<=: ){re.escape(new)}|(?<=    ){re.escape(new)}", old, undone)
        assert times == 1, new
    assert undone == TEXT


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_what_was_written_is_read_back(newline):
    text = TEXT.replace("\n", newline)
    data, *_ = read(rewritten(text, {p: new for p, (_, new) in PLACES.items()}), "x.yaml")

    assert [clause["at_most"] for clause in data["statistical"]] == [0.013, 0.5, 1e-5]
    assert data["kernels"]["infer"]["model"] == "../q 1.json"
    assert data["metadata"]["title"] == "at_most: 0.02"


def test_a_limit_behind_an_anchor_changes_where_it_stands():
    text = "a: &x  0.02  # here\nb: {at_most: *x}\n"
    assert rewritten(text, {("b", "at_most"): "0.03"}) == "a: &x  0.03  # here\nb: {at_most: *x}\n"


def test_one_text_cannot_stand_for_two_limits():
    text = "a: [{at_most: &x 0.02}, {at_most: *x}]\n"
    places = {("a", 0, "at_most"): "0.03", ("a", 1, "at_most"): "0.05"}

    with pytest.raises(ContractError) as caught:
        rewritten(text, places)

    assert str(caught.value) == (
        "the contract:1:18: one text stands for two limits through an alias, which are now 0.03 "
        "and 0.05\n    1 | a: [{at_most: &x 0.02}, {at_most: *x}]\n                         ^\n"
        "  hint: write the number out in each clause"
    )


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_a_note_has_a_line_of_its_own_above_its_value(newline):
    text = TEXT.replace("\n", newline)
    notes = {place: f"was {old}" for place, (old, _) in PLACES.items() if "at_most" in place}
    found = rewritten(text, {p: new for p, (_, new) in PLACES.items()}, notes)

    lines = found.split(newline)
    assert "\n".join(lines).count("\n") == found.count(newline)
    assert lines[lines.index("    # was .2") + 1].startswith("    at_most:    0.5   #")
    assert lines[lines.index("  # was 0.0010") + 1] == "  - {id: k3, at_most: 1e-05, clip: 1.0}"
    kept = newline.join(line for line in lines if "# was" not in line)
    assert kept == rewritten(text, {p: new for p, (_, new) in PLACES.items()})
