# Promotions in virtual time: the steps are those of a real one, only clock and tokens are made.

import pytest

from servanda.contract.stages import course_of
from servanda.errors import ContractError
from servanda.runner.load import load
from tests.authoring.contract_test.made import case, rehearsed, written

RULES = """\
stable: {engine: table, model: q.json}
slices: [{name: first, split: labels.first}]
escalation:
  - {when: {clause: tv, is: violated}, do: [{divert: slice}, {page: oncall}]}
  - {when: {section: observability, is_not: holds}, do: [hold]}
"""
STAGES = """\
promotion:
  offline: {prompt_groups: [100, 2000]}
  shadow: {prompt_groups: [100, 2000]}
  canary:
    steps: [0.05, 0.5]
    prompt_groups: [100, 2000]
    dwell: 5m
    approval: required
    if_inconclusive: CASE
  full: {sample: 0.01}
  valid_for: 30d
"""
CLOCK = "clock: {every: 1m, groups: 300}"


def promoting(folder, cases, *, if_inconclusive="wait", more="", **given):
    """What a test found of a contract with all four stages."""
    file = written(folder, cases, **{"slices": RULES, "limit": 0.2, "claim": "realised", **given})
    path = folder / "toy.kernelcontract.yaml"
    text = path.read_text()
    text = text[: text.index("promotion:")] + more
    path.write_text(text + STAGES.replace("CASE", if_inconclusive))
    from servanda.authoring.contract_test.files import prepare_tests

    (one,) = prepare_tests(file)
    return one.run()


def shown(found, i=0):
    """(time, where the promotion stands) of a case's expectations."""
    return [(look.at, look.stands) for look in found.cases[i].expectations]


@pytest.mark.slow
def test_a_good_build_goes_through_and_waits_for_its_dwell_and_a_person(tmp_path):
    text = case(
        '"0x9000"',
        "{at: 0s, leg: offline, status: awaiting_evidence, can_promote: false, share: 0}",
        "{at: 1m, leg: shadow, status: running, verdict: holds, can_promote: true}",
        "{at: 2m, leg: canary-1, status: running, share: 0.05}",
        "{at: 419s, leg: canary-1, stage: canary, share: 0.05}",
        "{at: 7m, leg: canary-2, share: 0.5}",
        "{at: 15m, leg: canary-2, status: awaiting_approval}",
        "{at: 20m, stage: full, share: 1, status: completed, paged: []}",
        more=f"{CLOCK}\nacts: [{{at: 19m, approve: alice}}]",
    )
    found = promoting(tmp_path, text)
    assert found.passed, shown(found)
    assert shown(found)[5] == (
        900.0,
        "canary-2, awaiting approval: everything holds; full-1 needs an approval",
    )


@pytest.mark.slow
def test_without_the_person_it_waits(tmp_path):
    text = case('"0x9000"', "{at: 30m, leg: canary-2, status: awaiting_approval}", more=CLOCK)
    assert promoting(tmp_path, text).passed


def test_what_drifts_on_a_step_is_rolled_back_at_once_and_told_once(tmp_path):
    text = case(
        '{"first=a": "0x1500 -2x6000", rest: "0x7500"}',
        "{at: 5m, leg: canary-1, status: running, paged: []}",
        "{at: 7m, status: rolled_back, share: 0, verdict: violated, paged: [oncall]}",
        "{at: 20m, status: rolled_back, paged: [oncall]}",
        "{at: 7m, cells: {tv on first=a: violated}, actions: [{divert: slice}, {page: oncall}]}",
        more=CLOCK,
    )
    found = promoting(tmp_path, text)
    assert found.passed, shown(found)
    assert shown(found)[1][1] == "canary-1, rolled back: tv on first=a is violated"


def test_a_leg_begins_from_nothing(tmp_path):
    """What passed on a leg before is seen by no leg after it."""
    text = case('"0x900"', "{at: 2m, verdict: holds}", "{at: 3m, verdict: holds}", more=CLOCK)
    found = promoting(tmp_path, text)
    groups = [look.groups for look in found.cases[0].expectations]
    assert groups == [300, 300]
    one, two = (look.verdict for look in found.cases[0].expectations)
    assert (one.stage, two.stage) == ("shadow", "canary")


def test_a_violation_spends_the_part_of_its_leg(tmp_path):
    text = case('"0x900"', "{at: 3m, verdict: holds}", more=CLOCK)
    verdict = promoting(tmp_path, text).cases[0].expectations[0].verdict
    legs = course_of(load(tmp_path / "toy.kernelcontract.yaml"))
    assert verdict.part == legs[2].part == pytest.approx(1 / 5)


def test_an_override_lets_a_cell_not_count_until_it_expires(tmp_path):
    text = case(
        '"0x600 -2x6000"',
        "{at: 6m, leg: shadow, status: awaiting_evidence, verdict: violated}",
        "{at: 7m, status: rolled_back}",
        more=f"{CLOCK}\nacts: [{{at: 2m, override: tv, ttl: 5m}}]",
    )
    found = promoting(tmp_path, text)
    assert found.passed, shown(found)
    # where everything is overridden no promise is left, and nothing goes forward on none
    assert "shadow, awaiting evidence: nothing was judged" in shown(found)[0][1]


def test_a_part_of_a_clause_can_be_overridden(tmp_path):
    text = case(
        '{"first=a": "0x600 -2x6000", rest: "0x6600"}',
        "{at: 3m, leg: canary-1, share: 0.05, verdict: violated}",
        "{at: 7m, leg: canary-1, status: rolled_back}",
        more=f'{CLOCK}\nacts: [{{at: 1m, override: "tv on first=a", ttl: 6m}}, '
        '{at: 1m, override: "tv on all", ttl: 6m}]',
    )
    found = promoting(tmp_path, text)
    assert found.passed, shown(found)


def test_a_person_rolls_back_from_anywhere(tmp_path):
    text = case(
        '"0x3000"',
        "{at: 3m, status: running}",
        "{at: 4m, status: rolled_back, share: 0}",
        more=f"{CLOCK}\nacts: [{{at: 210s, roll_back: bob}}]",
    )
    found = promoting(tmp_path, text)
    assert found.passed
    assert shown(found)[1][1] == "canary-1, rolled back: bob rolled back: rehearsed"


def test_failures_of_measuring_have_a_budget_of_their_own(tmp_path):
    acts = ", ".join(f"{{at: {n}m, fails: no engine}}" for n in (2, 3, 4))
    text = case(
        '"0x3000"',
        "{at: 3m, leg: shadow, status: awaiting_evidence}",
        "{at: 4m, leg: shadow, status: halted}",
        "{at: 5m, leg: canary-1, status: running}",
        more=f"{CLOCK}\nacts: [{acts}]",
    )
    assert promoting(tmp_path, text).passed


@pytest.mark.parametrize("what", ["weights", "train", "infer", "stable"])
def test_another_kernel_supersedes_the_run(tmp_path, what):
    text = case(
        '"0x3000"',
        "{at: 2m, leg: canary-1}",
        "{at: 3m, status: superseded, share: 0}",
        more=f"{CLOCK}\nacts: [{{at: 3m, changes: {what}}}]",
    )
    assert promoting(tmp_path, text).passed


def test_silence_is_not_success_in_a_promotion(tmp_path):
    """Everything is lost: nothing holds, and nothing goes forward."""
    text = case('"_x3000"', "{at: 10m, leg: offline, verdict: error, share: 0}", more=CLOCK)
    found = promoting(tmp_path, text)
    assert found.passed, shown(found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "status"),
    [("wait", "awaiting_evidence"), ("hold", "halted"), ("roll_back", "rolled_back")],
)
def test_what_is_undecided_at_the_limit_follows_the_contract(tmp_path, end, status):
    text = case('"0x600 -0.223x3000"', f"{{at: 12m, stage: canary, status: {status}}}", more=CLOCK)
    found = promoting(tmp_path, text, if_inconclusive=end)
    assert found.passed, shown(found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("clause", "missing", "given", "expected"),
    [
        ("seen, metric: scoring_rate, at_least: 0.01", "rescored: 0.02", "", "leg: canary-1"),
        ("seen, metric: scoring_rate, at_least: 0.01", "", "rescored: 0.005", "leg: canary-1"),
        ("seen, metric: scoring_rate, at_least: 0.01", "", "rescored: 0.02", "leg: canary-2"),
        (
            "split, metric: sample_ratio",
            "sample_ratio: 1.0",
            "",
            "leg: canary-1, status: awaiting_evidence",
        ),
        ("split, metric: sample_ratio", "", "sample_ratio: 1.0", "leg: canary-2"),
        ("split, metric: sample_ratio", "", "sample_ratio: 0.6", "status: rolled_back"),
    ],
)
def test_the_shares_scored_again_and_of_users_are_given_beside_the_series(
    tmp_path, clause, missing, given, expected
):
    more = f"observability:\n  clauses:\n    - {{id: {clause}, stages: [canary]}}\n"
    text = case('"0x4000"', f"{{at: 9m, {expected}}}", more=f"{CLOCK}\n{given}".rstrip())
    found = promoting(tmp_path, text, more=more)
    assert found.passed, shown(found)
    name = clause.split(",")[0]
    assert found.cases[0].not_given == ((f"{name}: write {missing}",) if missing else ())


def test_an_act_that_a_promotion_refuses_is_said_at_its_place(tmp_path):
    text = case(
        '"0x900"', "{at: 3m, status: running}", more=f"{CLOCK}\nacts: [{{at: 1m, approve: a}}]"
    )
    with pytest.raises(ContractError) as caught:
        promoting(tmp_path, text)
    (problem,) = caught.value.problems
    assert "does not wait for an approval" in problem.message
    assert "acts: [{at: 1m, approve: a}]" in problem.where.text


@pytest.mark.parametrize("leg", ["canary-3", "full-0"])
def test_a_leg_that_is_none_is_refused(tmp_path, leg):
    with pytest.raises(ContractError, match=f"the promotion has no leg '{leg}'"):
        promoting(tmp_path, case('"0x900"', f"{{at: 1m, leg: {leg}}}", more=CLOCK))


def test_a_clock_that_ticks_too_often_is_refused(tmp_path):
    text = case('"0x900000"', "{at: 2h, leg: shadow}", more="clock: {every: 1s, groups: 1}")
    with pytest.raises(ContractError, match="7,200 looks until then; a case has at most 1,000"):
        promoting(tmp_path, text)


def test_a_contract_without_other_stages_has_one_leg(tmp_path):
    text = case('"0x900"', "{at: 3m, leg: offline, status: completed}", more=CLOCK)
    found = rehearsed(tmp_path, text, limit=0.2, claim="realised", last=900)
    assert found.cases[0].expectations[0].verdict.outcome == "holds"
