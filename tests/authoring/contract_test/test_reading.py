# What is wrong with the text of a test is said with its place, all at once, and never guessed.

import pytest

from servanda.authoring.contract_test.files import read_tests
from servanda.errors import ContractError

GOOD = """\
apiVersion: servanda.dev/v1alpha1
kind: ContractTest
metadata: {name: t}
contract: c.yaml
seed: 3
cases:
  - name: one
    traffic: {"first=a": "gap(0.1)x40", rest: 'gap(0.01)x40'}
    expect:
      - {after: 20, verdict: holds}
"""


def problems(text):
    with pytest.raises(ContractError) as caught:
        read_tests(text, "t.kerneltest.yaml")
    return caught.value


def test_a_test_is_read_with_its_places():
    (test,) = read_tests(GOOD, "t.kerneltest.yaml")
    assert test.seed == 3 and test.contract == "c.yaml"
    assert str(test.where("cases", 0, "expect", 0, "verdict")) == "t.kerneltest.yaml:10:30"
    assert [len(series) for series in test.cases[0].traffic.values()] == [40, 40]


def test_one_series_is_for_all_tokens_and_no_number():
    own = """{"first=a": "gap(0.1)x40", rest: 'gap(0.01)x40'}"""
    (test,) = read_tests(GOOD.replace(own, "gap(0)x40"), "t")
    assert {name: str(s) for name, s in test.cases[0].traffic.items()} == {"all": "gap(0)x40"}
    (problem,) = problems(GOOD.replace(own, "0x40")).problems
    assert problem.message == "a series is a text, found the number 64"
    assert problem.hint.startswith("put it in quotes")


def test_a_contract_is_no_test():
    text = "apiVersion: servanda.dev/v1alpha1\nkind: KernelContract\nmetadata: {name: x}\n"
    assert str(problems(text)) == (
        "t.kerneltest.yaml:2:7: this is a KernelContract, and `servanda contract test` reads a "
        "ContractTest\n    2 | kind: KernelContract\n              ^\n"
        "  hint: name it under contract: of a file that ends in .kerneltest.yaml"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the contract test is empty"),
        ("# nothing\n---\n", "the contract test is empty"),
        ("- a\n", "a contract test is a mapping, found a list"),
        ("a: [1\n", "this '[' is never closed"),
        ("seed: !!int 3\n", "a contract test has no tags"),
    ],
)
def test_what_is_no_document_is_refused(text, message):
    assert message in str(problems(text))


def test_a_file_may_hold_several_documents_each_with_the_places_of_the_file():
    text = f"# two\n---\n{GOOD}---\n{GOOD.replace('name: t', 'name: u')}"
    first, second = read_tests(text, "t")
    assert (first.metadata.name, second.metadata.name) == ("t", "u")
    assert first.where("contract").line == 6
    assert second.where("contract").line == 17
    found = problems(text.replace("gap(0.1)", "gab(0.1)"))  # those of all are said at once
    assert [p.where.line for p in found.problems] == [10, 21]


def test_a_series_that_cannot_be_read_is_shown_with_a_caret_at_its_character():
    assert str(problems(GOOD.replace("gap(0.1)x40", "gap(0.1)x20 gab(0.1)x20"))) == (
        "t.kerneltest.yaml:8:39: no draw is named 'gab'\n"
        """    8 |     traffic: {"first=a": "gap(0.1)x20 gab(0.1)x20", rest: 'gap(0.01)x40'}\n"""
        "                                              ^\n"
        "  hint: did you mean 'gap'?"
    )


@pytest.mark.parametrize(
    ("old", "new", "place", "message", "hint"),
    [
        ("traffic:", "trafic:", "8:5", "a case has no key 'trafic'", "did you mean 'traffic'?"),
        ("seed: 3", "seed: '3'", "5:7", "a whole number is wanted, found the text '3'", "1, 2, 3"),
        (
            "contract: c.yaml",
            "contract: [a, b]",
            "4:11",
            "text is wanted, found a list",
            "one file",
        ),
        (
            "contract: c.yaml\n",
            "",
            "1:1",
            "a contract test needs the key 'contract'",
            "add contract",
        ),
        ("verdict: holds", "verdict: hold", "10:30", "verdict cannot be 'hold'", "did you mean"),
        ("verdict: holds", "verdit: holds", "10:21", "an expectation has no key", "'verdict'?"),
        (", verdict: holds", "", "10:9", "the expectation expects nothing", "add verdict: holds"),
        ("after: 20", "after: -1", "10:17", "after must be at least 0, found -1", ""),
        ("after: 20", "after: 41", "10:17", "traffic on first=a ends after 40", "look earlier"),
        ("after: 20", "at: 5m", "10:10", "at is about a promotion", "clock: {every: 1m"),
        ("after: 20", "leg: shadow", "10:10", "leg is about a promotion", "clock: {every: 1m"),
        ("{after: 20, verdict: holds}", "{cells: {tv: red}}", "10:22", "tv cannot be", "holds"),
        (
            "    traffic",
            "    acts: [{at: 1m, approve: a}]\n    traffic",
            "8:5",
            "acts are done",
            "clock",
        ),
        (
            "    expect:\n      - {after: 20,",
            "    clock: {every: 1m, groups: 4}\n    acts: [{at: 6m, approve: a}]\n    expect:\n"
            "      - {at: 5m,",
            "10:17",
            "the act is never done: the last look of the case is before it",
            "expect something at a later time",
        ),
        ("kind: ContractTest", "kind: ContractTests", "2:7", "kind cannot be", "ContractTest'?"),
        ("apiVersion: servanda.dev/v1alpha1", "apiVersion: v2", "1:13", "apiVersion cannot be", ""),
        ("  - name: one", "  - name: ''", "7:11", "String should have at least 1 character", ""),
    ],
)
def test_what_is_wrong_is_said_at_its_place(old, new, place, message, hint):
    assert old in GOOD
    found = problems(GOOD.replace(old, new, 1))
    texts = [(f"{p.where.line}:{p.where.column}", p.message, p.hint) for p in found.problems]
    assert texts[0][0] == place, texts
    assert message in texts[0][1]
    assert hint in texts[0][2]


CLOCKED = GOOD.replace("    expect:", "    clock: {every: 1m, groups: 10}\n    expect:")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("after: 20", "after: 20", "a case with a clock is looked at by its time"),
        ("after: 20, ", "", "the expectation does not say when"),
        ("after: 20", "at: 5m", ""),
        ("after: 20", "at: 4m59s", "a duration is a number and ms, s, m, h or d"),
        ("after: 20", "at: 5", "a duration is a text such as 30s, 5m, 1h or 7d"),
        ("after: 20, verdict: holds", "at: 5m", "the expectation expects nothing"),
        ("after: 20", "at: 5m, status: runing", "status cannot be 'runing'"),
        ("after: 20", "at: 5m, stage: live", "stage cannot be 'live'"),
        ("every: 1m", "every: 0s", "every must be greater than 0"),
        ("groups: 10", "groups: 0", "groups must be at least 1, found 0"),
    ],
)
def test_a_case_with_a_clock_speaks_of_times(old, new, message):
    assert old in CLOCKED
    text = CLOCKED.replace(old, new, 1)
    if not message:
        assert "5m" in text
        found = str(problems(text))
        assert "ends after 40 prompt groups, and the look is after 50" in found
        return
    assert message in str(problems(text))


@pytest.mark.parametrize("act", ["{at: 1m}", "{at: 1m, approve: a, roll_back: b}"])
def test_an_act_is_one_thing(act):
    text = CLOCKED.replace("    expect:", f"    acts: [{act}]\n    expect:").replace(
        "after: 20", "at: 2m"
    )
    assert "an act is one of approve, roll_back, override, fails, changes" in str(problems(text))


def test_what_is_compared_has_to_be_there_and_a_name_is_of_one_case():
    """A look after some groups, and a floor beside nothing."""
    text = GOOD + GOOD[GOOD.index("  - name") :]
    assert "two cases are named 'one'" in str(problems(text))
    lines = [line for line in GOOD.splitlines() if "traffic" not in line]
    assert "there are no 20 prompt groups: the case gives no traffic" in str(
        problems("\n".join(lines))
    )
    noisy = GOOD.replace("traffic:", "self_noise:")
    assert "self_noise is measured beside traffic, and the case has none" in str(problems(noisy))
