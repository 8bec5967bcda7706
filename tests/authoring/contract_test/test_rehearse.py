# What a contract answers to synthetic data, against numbers that are computed directly.

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from servanda.authoring.contract_test.files import read_tests, run_test
from servanda.errors import ContractError
from servanda.runner import load
from servanda.theory.stats.bets import weights_below
from servanda.theory.stats.log_moment import LogMoment
from tests.authoring.contract_test.made import case, rehearsed, written
from tests.drawn import examples

NOISE = "  - {id: tail, metric: abs_log_ratio_nats, aggregate: p90, at_most: 0.1, slices: all}"


def cell_of(found, name, i=0, j=0):
    """A cell of one expectation's verdict."""
    cells = found.cases[i].expectations[j].verdict.cells
    (cell,) = (c for c in cells if f"{c.clause} on {c.slice}" == name)
    return cell


def refused(folder, cases, **more):
    with pytest.raises(ContractError) as caught:
        rehearsed(folder, cases, **more)
    return caught.value


# oracles


def test_values_on_every_token_are_weighed_to_the_last_digit(tmp_path):
    """E (1-w)^+ of fixed log ratios needs no sample: it is one number."""
    text = case('"-0.02x32 0.5x32"', "{after: 32, verdict: holds}", "{after: 64, verdict: holds}")
    found = rehearsed(tmp_path, text, limit=0.1)
    assert cell_of(found, "tv on all").value == pytest.approx(1 - math.exp(-0.02), rel=1e-9)
    assert cell_of(found, "tv on all", j=1).value == pytest.approx(
        (1 - math.exp(-0.02)) / 2, rel=1e-9
    )


@pytest.mark.parametrize("claim", ["realised", "population"])
def test_an_interval_holds_what_the_series_means(tmp_path, claim):
    """Of d ~ Normal(-s²/2, s), E (1-w)^+ = 2 Phi(s/2) - 1."""
    sd = 0.1
    found = rehearsed(
        tmp_path, case(f'"gap({sd})x1500"', "{verdict: holds}"), claim=claim, limit=0.1
    )
    low, high = cell_of(found, "tv on all").interval
    truth = math.erf(sd / 2 / math.sqrt(2))
    assert low < truth < high
    assert cell_of(found, "tv on all").value == pytest.approx(truth, rel=0.05)
    assert found.passed


def test_the_evidence_is_that_of_the_certificate_by_hand(tmp_path):
    """Each token of a realised claim is one x of LogMoment, and nothing else is."""
    found = rehearsed(
        tmp_path, case('"-0.02x40"', "{verdict: holds}"), claim="realised", limit=0.1, width=5
    )
    x_N = np.full(200, -math.expm1(-0.02))
    cell = cell_of(found, "tv on all")
    assert cell.n == 200 and cell.units == "tokens"
    by_hand = LogMoment.of(x_N).log_e_below(0.1, weights_below(0.1))
    assert cell.e_holds == pytest.approx(by_hand, rel=1e-6)


def test_a_series_of_a_slice_moves_that_slice_and_no_other(tmp_path):
    series = '{"first=a": "-0.7x200", late: "-0.3x200", rest: "0x200"}'
    found = rehearsed(tmp_path, case(series, "{verdict: violated}"), limit=0.05)
    assert cell_of(found, "tv on first=a").value == pytest.approx(1 - math.exp(-0.7))
    # what begins with a follows the first series that it is in
    assert cell_of(found, "tv on first=b").value == pytest.approx((1 - math.exp(-0.3)) / 3)
    assert found.passed


@pytest.mark.parametrize("name", ["unsure", "long"])
def test_slices_of_contexts_and_of_prompt_lengths_are_met_by_the_same_cuts(tmp_path, name):
    found = rehearsed(
        tmp_path, case(f'{{{name}: "-0.7x200", rest: "0x200"}}', "{verdict: violated}"), limit=0.2
    )
    assert cell_of(found, f"tv on {name}").value == pytest.approx(1 - math.exp(-0.7))
    assert 0 < cell_of(found, "tv on all").value < 0.4


def test_one_log_ratio_drives_every_sampled_metric(tmp_path):
    more = "\n".join(
        [
            NOISE,
            "  - {id: k3, metric: k3_nats, aggregate: mean, clip: 1.0, at_most: 0.2, slices: all}",
            "  - {id: cam, metric: le_cam, aggregate: mean, at_most: 0.4, slices: all}",
        ]
    )
    found = rehearsed(
        tmp_path, case('"-0.05x1500"', "{cells: {tail: holds}}"), more=more, claim="realised"
    )
    assert cell_of(found, "tail on all").value == 0
    assert cell_of(found, "k3 on all").value == pytest.approx(math.expm1(-0.05) + 0.05, rel=1e-6)
    assert found.passed


def test_tokens_that_train_gives_no_mass_are_evidence_and_lost_ones_are_missing(tmp_path):
    found = rehearsed(
        tmp_path,
        case('"-infx40"', "{verdict: violated}")
        + case('"0x20 _x20"', "{verdict: error}", name="b"),
        claim="realised",
    )
    assert found.passed
    assert cell_of(found, "tv on all").value == 1
    lost = cell_of(found, "usable_ratio on all", i=1)
    assert (lost.value, lost.missing) == (0.5, 120)


def test_an_undisclosed_temperature_is_seen_by_the_guard(tmp_path):
    text = case(
        '"0x400"',
        "{cells: {sampler_fidelity: violated, tv on all: inconclusive}}",
        more="temperature: 0.7",
    )
    text += case('"0x400"', "{cells: {sampler_fidelity: holds, tv on all: holds}}", name="b")
    assert rehearsed(tmp_path, text).passed


@pytest.mark.slow
def test_limits_relative_to_noise_and_to_stable_take_series_of_their_own(tmp_path):
    more = "\n".join(
        [
            f"  - {{id: {name}, metric: tv, aggregate: mean, at_most: {limit}, slices: all}}"
            for name, limit in (
                ("n", "{times: 3, of: self_noise}"),
                ("s", "{times: 2, of: stable}"),
            )
        ]
    )
    good = 'self_noise: "gap(0.05)x1900"\nstable: "gap(0.05)x1900"'
    text = case('"gap(0.05)x1900"', "{cells: {n: holds, s: holds}}", more=good)
    text += case('"gap(0.4)x1900"', "{cells: {n: violated, s: violated}}", name="b", more=good)
    text += case('"gap(0.05)x1900"', "{verdict: inconclusive}", name="c")
    found = rehearsed(
        tmp_path, text, more=more, slices="", stable="q.json", limit=0.3, claim="realised"
    )
    assert found.passed
    assert found.cases[2].not_given == (
        'n: write self_noise: "gap(0.001)x6000"',
        's: write stable: "gap(0.001)x6000"',
    )


# what is not given


GOLDEN = """\
golden: {prompts: golden.jsonl}
numerical:
  - {id: drift, metric: logit_osc_nats, aggregate: max, at_most: 0.5, slices: all}
runtime:
  clauses:
    - id: ttft
      metric: time_to_first_token_seconds
      aggregate: p95
      at_most: 0.5
      load: {concurrency: 2}
    - {id: speed, metric: tokens_per_second, at_least: 10, load: {concurrency: 2}}
    - {id: alone, metric: batch_invariance_nats, at_most: 0.1}
"""


@pytest.fixture
def golden(tmp_path):
    from tests import kit

    kit.golden(tmp_path)
    return GOLDEN


def test_what_a_case_does_not_give_is_inconclusive_and_named(tmp_path, golden):
    text = case('"0x200"', "{verdict: inconclusive, can_promote: false}")
    found = rehearsed(tmp_path, text, golden=golden)
    assert found.passed
    assert found.cases[0].not_given == (
        "drift: write golden: {logit_osc_nats: ...}",
        "ttft: write timing: {ttft: ...}",
        "speed: write timing: {speed: ...}",
        "alone: it is measured on engines alone",
    )
    assert cell_of(found, "drift on all").note == "not given: write golden: {logit_osc_nats: ...}"


@pytest.mark.parametrize(
    ("level", "outcome"), [("0.4", "holds"), ("0.5", "holds"), ("0.51", "violated")]
)
def test_golden_numbers_are_judged_as_facts(tmp_path, golden, level, outcome):
    text = case("", f"{{cells: {{drift: {outcome}}}}}", more=f"golden: {{logit_osc_nats: {level}}}")
    assert rehearsed(tmp_path, text, golden=golden).passed


def test_service_levels_are_judged_as_timed(tmp_path, golden):
    good = case("", "{cells: {ttft: holds, speed: holds}}", more="timing: {ttft: 0.3, speed: 20}")
    slow = case(
        "",
        "{cells: {ttft: violated, speed: violated}}",
        name="b",
        more="timing: {ttft: 0.6, speed: 9}",
    )
    assert rehearsed(tmp_path, good + slow, golden=golden).passed


def test_a_test_may_give_numbers_for_every_case(tmp_path, golden):
    own = case("", "{cells: {drift: violated, ttft: holds}}", more="golden: {logit_osc_nats: 0.6}")
    top = "golden: {logit_osc_nats: 0.4}\ntiming: {ttft: 0.3}"
    text = case("", "{cells: {drift: holds, ttft: holds}}", name="b") + own
    assert rehearsed(tmp_path, text, golden=golden, top=top).passed


def test_what_golden_texts_show_the_corners_of_the_envelope_show_as_well(tmp_path):
    more = "numerical:\n  - {id: drift, metric: logit_osc_nats, at_most: 1.0, slices: all}\n"
    more += "runtime: {envelope: {batch_size: [1, 32]}}"
    texts = {"golden": "golden: {prompts: prompts.jsonl}", "more": more, "claim": "realised"}
    good = case('"gap(0.01)x200"', "{verdict: holds, cells: {drift: holds}}")
    good += case('"gap(0.01)x200"', "{cells: {drift on corner batch=32: violated}}", name="b",
                 more="golden: {logit_osc_nats: 1.5}")  # fmt: skip

    found = rehearsed(tmp_path, good, top="golden: {logit_osc_nats: 0.5}", **texts)

    assert found.passed and not found.cases[0].not_given


def test_an_expectation_that_no_limit_could_fail_is_refused(tmp_path):
    """Without data a clause is inconclusive, and a test that expects so tests nothing."""
    noise = "  - {id: n, metric: tv, aggregate: mean, at_most: {times: 3, of: self_noise}}"
    text = case('"gap(0.05)x100"', "{cells: {n on all: inconclusive, tv on all: inconclusive}}")
    (problem,) = refused(tmp_path, text, more=noise).problems
    assert problem.message == "the case has no data of 'n on all': it is inconclusive at any limit"
    assert problem.hint == 'write self_noise: "gap(0.001)x6000"'
    assert (problem.where.line, problem.where.column) == (11, 28)


def test_silence_is_not_success(tmp_path):
    text = case("", "{after: 0, verdict: inconclusive, can_promote: false, actions: []}")
    found = rehearsed(tmp_path, text)
    assert found.passed
    assert cell_of(found, "tv on all").n == 0


# actions


RULES = """\
slices: [{name: first, split: labels.first}]
escalation:
  - {when: {clause: tv, is: violated}, do: [{divert: slice}, {page: oncall}]}
  - {when: {section: statistical, is: violated}, do: [{page: oncall}, {sample: 0.10}]}
"""


def test_actions_are_compared_with_their_values_in_any_order(tmp_path):
    wanted = "[{sample: 0.1}, {page: oncall}, {divert: slice}]"
    text = case('"-1x200"', f"{{actions: {wanted}}}") + case('"0x200"', "{actions: []}", name="b")
    text += case('"-1x200"', f"{{actions: {wanted.replace('slice', 'all')}}}", name="c")
    *same, other = rehearsed(tmp_path, text, slices=RULES).cases
    assert all(one.passed for one in same)
    (check,) = other.expectations[0].checks
    assert not check.passed
    assert check.expected == "[{divert: all}, {page: oncall}, {sample: 0.1}]"
    assert check.found == "[{divert: slice}, {page: oncall}, {sample: 0.1}]"
    assert check.cell.outcome == "violated"


# properties


def outcomes(folder, limit, sd, seed=7):
    text = case(f'"gap({sd})x300"', *(f"{{after: {n}, verdict: holds}}" for n in (40, 100, 300)))
    found = rehearsed(folder, text, limit=limit, seed=seed, claim="realised")
    return [look.verdict.outcome for look in found.cases[0].expectations]


@pytest.mark.slow
@settings(max_examples=examples(12))
@given(st.sampled_from([0.02, 0.05, 0.1, 0.3]), st.sampled_from([0.01, 0.03, 0.08]))
def test_a_tighter_limit_never_turns_violated_into_holds(tmp_path_factory, sd, limit):
    order = ("violated", "inconclusive", "holds")
    tight, loose = (outcomes(tmp_path_factory.mktemp("c"), x, sd) for x in (limit, 2 * limit))
    assert all(order.index(a) <= order.index(b) for a, b in zip(tight, loose, strict=True))


def test_the_order_of_cases_and_of_expectations_changes_nothing(tmp_path):
    one = case('"gap(0.05)x200"', "{after: 50, verdict: holds}", "{after: 200, verdict: holds}")
    two = case(
        '"gap(0.3)x200"', "{after: 200, verdict: holds}", "{after: 50, verdict: holds}", name="b"
    )
    forth = rehearsed(tmp_path / "x", one + two)
    back = rehearsed(tmp_path / "y", two + one)
    for i, j in ((0, 1), (1, 0)):
        mine, theirs = (
            {look.groups: look.verdict.cells for look in found.cases[k].expectations}
            for found, k in ((forth, i), (back, j))
        )
        assert mine == theirs


def test_the_same_seed_gives_the_same_answer_and_another_other_draws(tmp_path):
    text = case('"gap(0.05)x200"', "{verdict: holds}")
    values = [
        cell_of(rehearsed(tmp_path / str(i), text, seed=seed), "tv on all").value
        for i, seed in enumerate((1, 1, 2))
    ]
    assert values[0] == values[1] != values[2]


def test_a_look_within_a_round_sees_the_first_groups_of_what_a_later_look_sees(tmp_path):
    text = case('"gap(0.05)x200"', "{after: 50, verdict: holds}", "{after: 64, verdict: holds}")
    found = rehearsed(tmp_path, text, round=64)
    early, late = (look.verdict for look in found.cases[0].expectations)
    assert (early.groups, early.tokens, late.groups) == (50, 300, 64)
    whole = rehearsed(tmp_path / "b", text, round=50)
    assert cell_of(found, "tv on all").value != cell_of(whole, "tv on all").value
    assert cell_of(found, "tv on all").n == 50


# what does not fit


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        (
            case('{"first=d": "0x40", rest: "0x40"}', "{verdict: holds}"),
            "no slice is named 'first=d'",
            "did you mean 'first=c'?",
        ),
        (
            case('{first: "0x40", rest: "0x40"}', "{verdict: holds}"),
            "slice 'first' is split, and a series is for one of its parts",
            "known: first=a, first=b, first=c",
        ),
        (
            case('{"first=a": "0x40"}', "{verdict: holds}"),
            "tokens outside first=a follow no series",
            "add rest:",
        ),
        (
            case('{all: "0x40", "first=a": "0x40"}', "{verdict: holds}"),
            "no token of this case follows the series of 'first=a'",
            "put this one before the others",
        ),
        (
            case('"0x40"', '{cells: {"tv on first=d": holds}}'),
            "no cell is named 'tv on first=d'",
            "did you mean 'tv on first=c'?",
        ),
        (case('"0x40"', "{cells: {tvv: holds}}"), "no cell is named 'tvv'", "did you mean 'tv'?"),
        (
            case('"0x40"', "{verdict: holds}", more="golden: {logit_osc_nats: 1}"),
            "no numerical clause concerns 'logit_osc_nats'",
            "remove golden",
        ),
        (
            case('"0x40"', "{verdict: holds}", more="timing: {ttft: 1}"),
            "no clause about time or speed is named 'ttft'",
            "remove timing",
        ),
        (
            case('"0x9000"', "{after: 3000, verdict: holds}"),
            "a run of this contract ends after 2,016 prompt groups",
            "look earlier",
        ),
    ],
)
def test_what_the_contract_does_not_have_is_said_in_the_tests_places(tmp_path, text, message, hint):
    found = refused(tmp_path, text)
    assert found.problems[0].message == message
    assert hint in found.problems[0].hint
    assert found.problems[0].where.file.endswith("toy.kerneltest.yaml")


def test_too_many_tokens_are_refused_and_shorter_answers_help(tmp_path):
    text = case('"0x2000"', "{after: 2000, verdict: inconclusive}")
    found = refused(tmp_path, text, width=20_000, limit=0.3)
    assert "2,000 prompt groups are 40,000,000 tokens" in found.problems[0].message
    assert "answer_tokens: 32" in found.problems[0].hint
    done = rehearsed(tmp_path / "b", text, width=20_000, limit=0.3, top="answer_tokens: 2")
    assert done.cases[0].expectations[0].verdict.tokens == 4000


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"limit": -1}, "toy.kernelcontract.yaml:"),  # reported in its own places
        ({"limit": 0.0001}, "cannot hold on slice 'all'"),  # no run can decide it
        ({"contract": "none.yaml"}, "there is no "),
        ({"contract": "toy.kerneltest.yaml"}, "this is a ContractTest"),
    ],
)
def test_a_contract_that_is_none_or_broken_is_refused(tmp_path, given, message):
    found = refused(tmp_path, case('"0x40"', "{verdict: holds}"), **given)
    assert message in str(found)
    own = "kernelcontract" if "limit" in given else "kerneltest"
    assert found.problems[0].where.file.endswith(f"toy.{own}.yaml")


def test_a_folder_of_tests_without_any_is_refused(tmp_path):
    from servanda.authoring.contract_test.files import files_of

    with pytest.raises(ContractError, match="holds no contract test"):
        files_of([tmp_path])


def test_the_pure_part_is_handed_what_it_reads(tmp_path):
    """Texts and corpora are arguments; no file is opened."""
    file = written(tmp_path, case('"0x60"', "{verdict: inconclusive}"))
    (test,) = read_tests(file.read_text(), "t")
    contract = load.load(tmp_path / "toy.kernelcontract.yaml")
    found = run_test(test, contract, *load.corpora(contract))
    assert (found.test, found.contract, found.digest) == ("toy-tests", "toy", contract.digest)
