# Moved limits: killed and survived as the tests of the contract say, and proofs of the rest.

import pytest

from servanda.authoring.mutation.mutants import mutants
from servanda.authoring.mutation.report import render
from servanda.authoring.mutation.run import mutate
from servanda.errors import ContractError
from tests.authoring.mutation import made

FEW = """\
  - name: a good kernel passes
    traffic: "gap(0.001)x320"
    expect: [{verdict: holds, actions: []}]
  - name: a bad one does not
    traffic: "-0.22x320"
    expect: [{verdict: violated, cells: {tv: violated}, actions: [hold]}]
"""


def limits_of(tests, **options):
    return mutate(tests[0].contract, tests, only="limits", **options)


@pytest.fixture(scope="module")
def sharp(tmp_path_factory):
    return limits_of(made.written(tmp_path_factory.mktemp("sharp")))


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    tests = made.written(tmp_path_factory.mktemp("few"), cases=FEW)
    return tests, limits_of(tests)


@pytest.mark.slow
def test_tests_that_ask_about_everything_notice_everything(sharp):
    assert sharp.counts() == (24, 24)
    assert (sharp.score, sharp.exit_code(1.0), sharp.toothless) == (1.0, 0, ())
    assert render(sharp).endswith("mutation score 24 of 24 (100 %): limits 24 of 24")


@pytest.mark.slow
def test_a_killed_mutant_names_the_case_that_notices(sharp):
    by = {tried.name: tried.by for tried in sharp.limits}

    assert by["tv as a warning"] == ("a little more than may be",)
    assert by["tail.aggregate p95"] == ("few tokens lie beyond",)
    assert by["finite.at_least 0.98"] == ("too many are lost",)
    assert by["without clause fidelity"] == (
        "another temperature: no cell is named 'fidelity'",  # the test does not fit it any more
    )


@pytest.mark.slow
def test_killed_and_survived_are_what_rehearsing_by_hand_says(few):
    (test,), found = few
    marks = {tried.name: tried.mark for tried in found.limits}

    for mutant in mutants(test.contract):
        try:
            passes = test.run(mutant.contract).passed
        except ContractError:
            passes = False
        if marks[mutant.name] == "equivalent":
            assert passes
        else:
            assert marks[mutant.name] == ("survived" if passes else "killed"), mutant.name
    assert 0 < found.counts()[0] < found.counts()[1]


@pytest.mark.slow
def test_a_survivor_says_where_it_stands_what_is_missing_and_what_came_nearest(few):
    _, found = few
    survivor = next(t for t in found.limits if t.name == "letter.at_most 0.2")

    assert survivor.where.line == 16
    assert "a case lies between 0.1 and 0.2, and is answered alike" in survivor.why
    assert str(survivor.near) == "letter on first=a, 0.197 in 'a bad one does not'"
    text = " ".join(render(found).split())
    assert (
        "toy.kernelcontract.yaml:17 tail: at_most 0.3 becomes 0.6 no case has p90 of "
        "abs_log_ratio_nats on all between 0.3 and 0.6"
    ) in text
    assert (
        "toy.kernelcontract.yaml:21 finite: at_least 0.99 becomes 0.98 no case has usable_ratio "
        "on all between 0.98 and 0.99 (nearest: finite on all, 1 in 'a good kernel passes')"
    ) in text


def test_nothing_is_said_of_a_contract_whose_tests_fail(tmp_path):
    cases = '  - {name: wrong, traffic: "0x160", expect: [{verdict: violated}]}\n'
    tests = made.written(tmp_path, cases=cases)

    with pytest.raises(ContractError) as error:
        limits_of(tests)

    assert str(error.value) == (
        "1 case fails before anything is moved: toy-tests: wrong\n"
        "  hint: repair the contract or its tests first: servanda contract test"
    )


def test_without_a_test_every_mutant_survives(tmp_path):
    contract = made.written(tmp_path)[0].contract

    found = mutate(contract, only="limits")

    assert found.counts() == (0, 24)
    assert (found.toothless, found.exit_code()) == (("limits",), 1)


@pytest.mark.slow
def test_limits_that_are_fifty_times_too_loose_are_toothless_by_name(tmp_path):
    loose = "metric: abs_log_ratio_nats, aggregate: p90, at_most: 15"  # good kernels have 0.3
    contract = made.CONTRACT
    for limit in (
        "metric: tv, aggregate: mean, at_most: 0.05",
        "metric: tv, aggregate: mean, at_most: 0.1",
        "metric: abs_log_ratio_nats, aggregate: p90, at_most: 0.3",
    ):
        contract = contract.replace(limit, loose)
    cases = (
        '  - {name: a good kernel passes, traffic: "gap(0.01)x400", expect: [{verdict: holds}]}\n'
    )

    found = limits_of(made.written(tmp_path, cases=cases, contract=contract))

    assert found.toothless == ("limits",)
    assert found.exit_code() == 1
    assert "TOOTHLESS: no case notices that a limit moved; nearest came " in render(found)


# mutants that are no survivors


def mark_of(tmp_path, contract, name):
    tests = made.written(tmp_path, cases=made.GOOD, contract=contract)
    return next(t for t in limits_of(tests).limits if t.name == name)


@pytest.mark.slow
def test_a_guard_that_a_plan_adds_anyway_is_equivalent_with_the_proof(sharp):
    tried = next(t for t in sharp.limits if t.name == "fidelity as a warning")

    assert tried.mark == "equivalent"
    assert tried.why == (
        "a plan adds this precondition, with the same limit, where a contract enforces none"
    )
    # that of finite is added with another limit than its own
    assert next(t for t in sharp.limits if t.name == "finite as a warning").mark == "killed"


def test_the_limit_of_a_clause_that_is_judged_nowhere_is_equivalent(tmp_path):
    line = "  - {id: live, metric: scoring_rate, over: 1h, at_least: 0.005}\n"
    contract = made.CONTRACT.replace("escalation:", f"  {line}escalation:", 1)

    tried = mark_of(tmp_path, contract, "live.at_least 0.01")

    assert tried.mark == "equivalent"
    assert tried.why == (
        "live is not judged at offline: nothing is served offline: it concerns traffic"
    )


def test_a_rule_that_another_repeats_is_equivalent(tmp_path):
    rule = "  - {when: {section: statistical, is: violated}, do: [{page: oncall}, hold]}\n"
    contract = made.CONTRACT.replace("promotion:", f"{rule}promotion:")

    tried = mark_of(tmp_path, contract, "without rule 2 of escalation")

    assert tried.mark == "equivalent"
    assert tried.why == (
        "rule 3 is met whenever section statistical is violated too, and asks for the same: an "
        "action is taken once"
    )
    # the third asks for more than the second
    assert mark_of(tmp_path, contract, "without rule 3 of escalation").mark == "survived"


def test_a_limit_that_the_sizes_cannot_certify_is_refused_before_any_test(tmp_path):
    contract = made.CONTRACT.replace("prompt_groups: [32, 1600]", "prompt_groups: [32, 48]")

    tried = mark_of(tmp_path, contract, "letter.at_most 0.05")

    assert tried.mark == "refused"
    assert (
        "clause 'letter' cannot hold on slice 'first=a': even identical kernels would need"
        in tried.why
    )


def test_the_time_that_is_over_leaves_mutants_open(tmp_path):
    left = iter([False, False, True])

    found = limits_of(made.written(tmp_path, cases=made.GOOD), deadline=lambda: next(left, True))

    assert [t.mark == "open" for t in found.limits].count(False) == 2
    assert (found.stopped, found.toothless) == ("time", ())
    assert found.exit_code() == 3
    assert render(found).endswith("; the time was over for 23 more")
