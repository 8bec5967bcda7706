# Mutants: every part of a contract that is enforced has its own, and each changes nothing else.

import math

import pytest

from servanda.authoring.mutation.mutants import lowered, mutants, raised
from tests.authoring.mutation import made
from tests.contract.test_whole_language import WHOLE
from tests.kit import parse


def read(text):
    engines = ("table", "transformers", "external")
    return parse(text, "toy.kernelcontract.yaml", engines=engines)[0]


def names(text):
    return [mutant.name for mutant in mutants(read(text))]


def with_clause(line, section="statistical", more=""):
    """A contract of one clause beside another, which has mutants of its own."""
    head, _, tail = made.CONTRACT.partition("statistical:")
    own = f"  - {line}\n"
    kept = "  - {id: tv, metric: tv, aggregate: mean, at_most: 0.05, slices: all}\n"
    promotion = tail[tail.index("promotion:") :]
    if section == "statistical":
        return f"{head}{more}statistical:\n{kept}{own}{promotion}"
    if section == "numerical":
        golden = "golden: {prompts: prompts.jsonl}\n"
        return f"{head}{more}{golden}numerical:\n{own}statistical:\n{kept}{promotion}"
    return f"{head}{more}statistical:\n{kept}{section}:\n  clauses:\n  {own}{promotion}"


# the numbers


@pytest.mark.parametrize(
    ("limit", "top", "low", "high"),
    [
        (0.02, 1.0, 0.01, 0.04),
        (3.0, math.inf, 1.5, 6.0),
        (0.999, 1.0, 0.998, 0.9995),  # by its distance to 1
        (0.6, 1.0, 0.2, 0.8),
        (0.5, 1.0, 0.25, 0.75),  # twice it can never fail
        (99.0, 100.0, 98.0, 99.5),
        (0.95, 1.0, 0.9, 0.975),
        (-0.2, math.inf, -0.4, -0.1),
    ],
)
def test_a_limit_moves_by_a_factor_of_two_to_both_sides(limit, top, low, high):
    assert next(lowered(limit, top=top)) == pytest.approx(low, rel=1e-12)
    assert next(raised(limit, top=top)) == pytest.approx(high, rel=1e-12)


def test_a_limit_of_zero_has_no_multiple_and_is_loosened_by_a_little():
    assert [*lowered(0.0)] == []
    assert next(raised(0.0)) == 1e-3


# every kind of clause


@pytest.mark.parametrize(
    ("line", "section", "moved"),
    [
        (
            "{id: x, metric: tv, aggregate: mean, at_most: 0.02}",
            "statistical",
            ["at_most 0.01", "at_most 0.04"],
        ),
        (
            "{id: x, metric: tv, aggregate: mean, at_most: 0.8}",
            "statistical",
            ["at_most 0.6", "at_most 0.9"],
        ),
        (
            "{id: x, metric: k3_nats, aggregate: mean, clip: 1.0, at_most: 0.1}",
            "statistical",
            ["at_most 0.05", "at_most 0.2"],
        ),
        (
            "{id: x, metric: abs_log_ratio_nats, aggregate: p99, at_most: 0.2}",
            "statistical",
            ["at_most 0.1", "at_most 0.4", "aggregate p98", "aggregate p99.5"],
        ),
        (
            "{id: x, metric: tv, aggregate: mean, at_most: {times: 3, of: self_noise}}",
            "statistical",
            ["at_most 2.5", "at_most 6"],  # below 2 it lies inside the noise
        ),
        (
            "{id: x, metric: logit_osc_nats, aggregate: max, at_most: 2}",
            "numerical",
            ["at_most 1", "at_most 4"],
        ),
        (
            "{id: x, metric: tokens_per_second, at_least: 100, load: {concurrency: 4}}",
            "runtime",
            ["at_least 50", "at_least 200"],
        ),
        (
            "{id: x, metric: time_to_first_token_seconds, aggregate: p99.9, at_most: 0.5, "
            "load: {concurrency: 4}}",
            "runtime",
            ["at_most 0.25", "at_most 1", "aggregate p99.8"],  # no percentile above p99.9
        ),
        ("{id: x, metric: batch_invariance_nats, at_most: 0}", "runtime", ["at_most 0.001"]),
        (
            "{id: x, metric: valid_ratio, at_least: 0.999}",
            "observability",
            ["at_least 0.998", "at_least 0.9995"],
        ),
        (
            "{id: x, metric: self_noise, at_most: 0.002}",
            "observability",
            ["at_most 0.001", "at_most 0.004"],
        ),
        ("{id: x, metric: sampler_fidelity}", "observability", []),
    ],
)
def test_every_kind_of_clause_has_its_mutants(line, section, moved):
    own = [m.name for m in mutants(read(with_clause(line, section))) if m.clause == "x"]

    assert own == [*(f"x.{name}" for name in moved), "x as a warning", "without clause x"]


def test_a_limit_on_rewards_stays_within_their_range():
    line = "{id: x, metric: reward_drift, at_most: 0.8, slices: all}"
    found = names(with_clause(line, more="reward: {range: [0, 1]}\n"))

    assert "x.at_most 0.6" in found and "x.at_most 0.9" in found


@pytest.mark.parametrize("word", ["severity: warning", "mode: monitor"])
def test_a_clause_that_is_only_shown_has_none(word):
    line = f"{{id: x, metric: tv, aggregate: mean, at_most: 0.02, {word}}}"
    assert not [m for m in mutants(read(with_clause(line))) if m.clause == "x"]


def test_sizes_are_no_matter_of_mutants():
    assert all(
        mutant.contract.promotion == read(made.CONTRACT).promotion
        for mutant in mutants(read(made.CONTRACT))
    )


def test_every_mutant_of_the_whole_language_is_a_contract_and_has_a_name_and_a_place():
    contract = read(WHOLE)
    found = [*mutants(contract)]

    assert len({mutant.name for mutant in found}) == len(found)
    for mutant in found:
        assert type(contract).model_validate(mutant.contract.model_dump()), mutant.name
        assert mutant.contract != contract
        assert mutant.where.file == "toy.kernelcontract.yaml"
        assert mutant.unasked and mutant.sentence
    enforced = [clause for _, _, clause in contract.clauses() if clause.enforced]
    for clause in enforced:
        kinds = {mutant.kind for mutant in found if mutant.clause == clause.id}
        assert kinds == {"limit", "severity", "clause"}, clause.id
    assert sum(mutant.kind == "slice" for mutant in found) == len(contract.slices)
    assert sum(mutant.kind == "escalation" for mutant in found) == len(contract.escalation)


# nothing else


def leaves(value, path=()):
    """path -> value of everything in plain data."""
    if isinstance(value, dict):
        return {k: v for n, x in value.items() for k, v in leaves(x, (*path, n)).items()}
    if isinstance(value, list | tuple):
        return {k: v for n, x in enumerate(value) for k, v in leaves(x, (*path, n)).items()}
    return {path: value}


def every(kind):
    contract = read(made.CONTRACT)
    return contract, [mutant for mutant in mutants(contract) if mutant.kind == kind]


@pytest.mark.parametrize("kind", ["limit", "severity"])
def test_a_moved_limit_changes_one_value_at_its_place(kind):
    contract, found = every(kind)
    before = leaves(contract.model_dump())

    for mutant in found:
        after = leaves(mutant.contract.model_dump())
        assert [k for k in {*before, *after} if before.get(k) != after.get(k)] == [mutant.place]


def test_a_removed_clause_takes_nothing_with_it_but_the_rules_that_watch_it():
    contract, found = every("clause")

    for mutant in found:
        before, after = contract.model_dump(), mutant.contract.model_dump()
        section, *rest, i = mutant.place
        holder = before[section]["clauses"] if rest else before[section]
        kept = [c for j, c in enumerate(holder) if j != i]
        if rest:
            before[section]["clauses"] = tuple(kept)
        else:
            before[section] = tuple(kept)
        rules = before["escalation"]
        before["escalation"] = tuple(
            rule for rule in rules if rule["when"].get("clause") != mutant.clause
        )
        assert after == before


def test_a_removed_slice_takes_its_name_and_what_speaks_of_nothing_else():
    contract, (mutant,) = every("slice")

    assert mutant.contract.slices == ()
    assert [c.id for _, _, c in mutant.contract.clauses()] == ["tv", "tail", "fidelity", "finite"]
    assert mutant.sentence == "slice first is removed, and letter, which concerns nothing else"
    kept = {"slices", "statistical"}
    assert mutant.contract.model_dump(exclude=kept) == contract.model_dump(exclude=kept)


def test_a_removed_rule_leaves_the_others():
    contract, (first, second) = every("escalation")

    assert first.contract.escalation == contract.escalation[1:]
    assert second.contract.escalation == contract.escalation[:1]
    assert first.sentence == (
        "rule 1 of escalation is removed: clause tail is violated: page oncall"
    )


# what they say


@pytest.mark.parametrize(
    ("name", "unasked"),
    [
        ("tv.at_most 0.1", "no case has tv on all between 0.05 and 0.1"),
        ("letter.at_most 0.05", "no case has tv on first between 0.05 and 0.1"),
        ("tail.at_most 0.6", "no case has p90 of abs_log_ratio_nats on all between 0.3 and 0.6"),
        (
            "tail.aggregate p95",
            "no case has between 5 % and 10 % of its tokens on all beyond 0.3",
        ),
        ("finite.at_least 0.98", "no case has usable_ratio on all between 0.98 and 0.99"),
        ("confidence 0.9", "no answer of a case is certain to 0.9 and not to 0.95"),
        ("tv as a warning", "no case expects a verdict or an action that tv alone decides"),
        (
            "without clause tv",
            "no case expects an answer of tv, or one that tv alone decides",
        ),
        (
            "without slice first",
            "no case expects an answer on first, or one that first alone decides",
        ),
        (
            "without rule 2 of escalation",
            "no case expects hold where section statistical is violated and no other rule asks "
            "for it",
        ),
    ],
)
def test_a_mutant_says_which_case_would_notice_it(name, unasked):
    found = {mutant.name: mutant for mutant in mutants(read(made.CONTRACT))}
    assert found[name].unasked == unasked
