# Which slices a dump gets: those that it has, with tokens enough to decide.

import operator
from bisect import bisect
from collections import Counter

import numpy as np
import pytest

from servanda.contract.clause import SliceRule
from servanda.judgement.clauses import token_counts
from servanda.judgement.clauses.token_counts import SliceCounts
from servanda.judgement.slices.rules import Cut, Term, cuts_of
from servanda.rl.dumps.statistics import PairFields
from servanda.rl.monitor.batch import COLUMNS, Batch, BatchFields
from servanda.rl.monitor.ranks import rollouts_of
from servanda.rl.steps.blocks import paired
from servanda.rl.steps.contract import STEP_FIELDS, Counts, corpus_of, rules_of, run_slices
from tests.rl.dumps import made


def rules(needed=50, **how):
    counts = Counts()
    counts.add(paired(made.rollouts(np.random.default_rng(0), 1, 48, **how), 0))
    found, notes = rules_of(counts, needed)
    return [rule.name for rule in found], notes


def test_what_a_dump_lacks_is_left_out():
    assert rules(turn_tokens=8) == ([], ())


def test_turns_and_their_first_tokens_are_slices():
    names, _ = rules(turns=5, turn_tokens=8)
    assert names[:8] == [
        *("turn-1", "turn-2", "turn-3", "turn-4-on"),
        *("start-1", "start-2", "start-3", "start-4-on"),
    ]


def test_a_slice_of_too_few_tokens_is_joined_to_its_neighbour():
    counts = Counts(turns=Counter({1: 100, 2: 100, 3: 20, 4: 5}), starts=Counter({1: 60, 2: 60}))
    found, _ = rules_of(counts, 50)
    assert [r.name for r in found] == ["turn-1", "turn-2-on", "start-1", "start-2-on"]
    assert found[1].match == {"context.turn": {"gte": 2}}


def test_labels_with_tokens_enough_are_slices_and_the_rest_is_told():
    names, notes = rules(labels={"env": lambda s: "rare" if s == 0 else f"e/{s % 2}"})
    assert [n for n in names if n.startswith("env")] == ["env-e-1", "env-e-0"]  # most first
    assert notes == (
        "1 of 3 values of env ('rare') have fewer than 50 tokens each: they are judged with the "
        "whole alone",
    )


def test_values_of_too_few_tokens_each_are_one_slice_where_they_have_enough_together():
    found, notes = rules_of(
        Counts(labels={"env": Counter(big=500, other=300, a=30, b=25)}), needed=50
    )
    assert {r.name: r.match["labels.env"]["in"] for r in found} == {
        "env-big": ["big"],
        "env-other": ["other"],
        "env-other.2": ["a", "b"],
    }
    assert notes[0].endswith("fewer than 50 tokens each: they are judged together, as env-other")


def test_of_many_values_the_largest_have_slices_and_the_rest_one():
    values = Counter({f"e{i:02}": 100 - i for i in range(20)})
    found, notes = rules_of(Counts(labels={"env": values}), needed=50)
    assert len(found) == 9 and found[-1].match["labels.env"]["in"] == sorted(values)[8:]
    assert "12 of 20 values of env" in notes[0] and "not among the 8 largest" in notes[0]


def test_two_labels_that_look_alike_as_names_are_two_slices():
    names, _ = rules(labels={"env": lambda s: ["a/b", "a b"][s % 2]})
    assert [n for n in names if n.startswith("env")] == ["env-a-b", "env-a-b.2"]


def test_staleness_is_a_slice_where_any_token_is_stale():
    assert not [n for n in rules(staleness=lambda _: 0)[0] if n.startswith("stale")]
    names, _ = rules(staleness=lambda s: s % 4)
    assert [n for n in names if n.startswith("stale")] == ["stale-0", "stale-1", "stale-2-on"]


@pytest.mark.parametrize("later", [50, 90, 480])
@pytest.mark.parametrize("first", [0, 30, 480])
def test_starts_of_later_turns_are_a_slice_whatever_turn_1_has(first, later):
    """Those of turn 1 stand behind a prompt: joined with them, a torn boundary is diluted away."""
    counts = Counts(turns=Counter({1: 4000, 2: 4000}), starts=Counter({1: first, 2: later}))
    found, notes = rules_of(counts, 50)
    names = [r.name for r in found if r.name.startswith("start")]
    assert names == [*(["start-1"] if first >= 50 else []), "start-2-on"]
    assert not notes


def test_starts_that_are_too_few_are_said():
    counts = Counts(turns=Counter({1: 4000, 2: 40}), starts=Counter({1: 480, 2: 20, 3: 9}))
    found, notes = rules_of(counts, 50)
    assert not [r.name for r in found if r.name.startswith("start-2")]
    assert notes == (
        "no slice by turn: those after the first have 40 tokens",
        "the first tokens of later turns are 29, fewer than 50: no slice shows tool boundaries",
    )


def test_a_batch_has_the_fields_that_a_step_is_sliced_by():
    assert {*COLUMNS} == {*STEP_FIELDS}


# ---- an oracle that walks the tokens, of labels that are missing, empty or known

OPS = {
    "gte": operator.ge,
    "gt": operator.gt,
    "lte": operator.le,
    "lt": operator.lt,
    "in": lambda value, of: value in of,
    "not_in": lambda value, of: value not in of,
}
SPLITS = (
    SliceRule(name="env", split="labels.env", most=1),
    SliceRule(name="turn", split="context.turn", at=(2, 3)),
    SliceRule(name="position", split="context.position", at=(2, 5)),
    SliceRule(name="length", split="context.length", at=(4, 9)),
)
MATCHES = (
    {"labels.env": {"in": ["a", "c"]}, "context.turn_position": {"lt": 2}},
    {"labels.env": {"exists": True}, "context.length": {"gt": 3}},
    {"labels.replica": {"exists": False}},
    {"context.position": {"gt": 5}},
    {"context.turn": {"gte": 2}, "context.turn_position": {"lte": 1}},
    {"request.prompt_tokens": {"lte": 1}},
    *({"outcome.staleness": {op: 1}} for op in ("gte", "gt", "lte", "lt")),
    {"outcome.staleness": {"gt": 0}, "labels.env": {"in": ["b"]}, "context.position": {"gte": 2}},
)
RULES = (*SPLITS, *(SliceRule(name=f"m{i}", match=of) for i, of in enumerate(MATCHES)))


def tokens_of(mask_T, labels, stale_T):
    """The fields of each trained token of a sequence, by its columns one after another."""
    fields, turn, in_turn, before = [], 0, 0, 0
    for t, trained in enumerate(mask_T):
        if trained:
            turn, in_turn = (turn, in_turn + 1) if t and mask_T[t - 1] else (turn + 1, 0)
            own = {"turn": turn, "turn_position": in_turn, "position": before, "length": t}
            fields.append({f"context.{name}": value for name, value in own.items()})
            fields[-1]["request.prompt_tokens"] = next(i for i, one in enumerate(mask_T) if one)
            fields[-1]["context.entropy_nats"] = None
            fields[-1]["outcome.staleness"] = None if np.isnan(stale_T[t]) else stale_T[t]
            fields[-1] |= {f"labels.{name}": value or None for name, value in labels.items()}
            before += 1
    return fields


def met(terms, token):
    """Whether a token meets all terms; None where that was not recorded.  A label is never that."""
    found = []
    for term in terms:
        value = token.get(term.field)
        if term.op == "exists":
            found.append((value is not None) == term.value)
        elif value is None:
            found.append(False if term.field.startswith("labels.") else None)
        else:
            found.append(OPS[term.op](value, term.value))
    return False if False in found else None if None in found else True


def counted(cut, tokens):
    """Tokens of a slice with a ratio, beside it, without one, and missing: see `SliceCounts`."""
    late = [term for term in cut.terms if term.field.startswith("outcome.")]
    n = dict.fromkeys(("count", "beside", "lost", "missing"), 0)
    for token, usable in tokens:
        inside, given = met(cut.terms, token), met([t for t in cut.terms if t not in late], token)
        beside = bool(late) and given is True and inside is False
        n["count"] += usable and inside is True
        n["lost"] += not usable and inside is True
        n["beside"] += usable and beside
        n["missing"] += given is not False and not (usable and (inside is True or beside))
    return n


@pytest.mark.parametrize("together", [1, 1 << 30])  # tokens from which slices are counted together
@pytest.mark.parametrize("aged", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_every_slice_counts_the_tokens_that_are_in_it(seed, aged, together, monkeypatch):
    monkeypatch.setattr(token_counts, "_TOKENS_AN_ATOM", together)
    rng, shape = np.random.default_rng(seed), (9, 14)
    mask_BT = rng.random(shape) < (0.7, 0.9, 1.0)[seed % 3]
    labels = {"env": [*rng.choice(["a", "b", "c", ""], shape[0])]}
    stale_BT = rng.choice([0.0, 1.0, 2.0, np.nan] if aged else [np.nan], shape)
    infer_BT = -rng.exponential(1.0, shape) - 0.1
    train_BT = infer_BT + rng.normal(0, 0.1, shape)
    infer_BT[rng.random(shape) < 0.2] = np.nan
    more = {"staleness": stale_BT} if aged else {}
    batch = Batch.of(train_BT, infer_BT, mask_BT, weights=1, labels=labels, **more)
    tokens = []
    for b, mask_T in enumerate(mask_BT):
        fields = tokens_of(mask_T, {"env": labels["env"][b]}, stale_BT[b])
        tokens += zip(fields, np.isfinite(infer_BT[b][mask_T]), strict=True)
    corpus = corpus_of("made", ((("env", v),) if v else () for v in labels["env"]))
    named = {name: of for name, of in cuts_of(RULES, corpus).items() if name != "all"}
    cuts = [cut for of in named.values() for cut in of]
    pair = paired(rollouts_of(batch), 0)
    logp_N = [side.columns["logp"] for side in (pair.train, pair.infer)]
    unsure = Term("context.entropy_nats", "gte", 1.0)  # which a dump does not record
    unknown = [Cut(cut.name, (*cut.terms, unsure)) for cut in cuts[-1:] + cuts[:3]]
    for fields, more, *columns in (
        (BatchFields(batch), [], train_BT, infer_BT, mask_BT),
        (PairFields(pair), unknown, *logp_N, np.ones(len(tokens), dtype=bool)),
    ):
        counts = SliceCounts([*cuts, *more])
        counts.add(fields, *columns)
        numbers = counts.count_CK.sum(axis=1), counts.beside_C, counts.lost_C, counts.missing_C
        for cut, *own in zip([Cut("all"), *cuts, *more], *numbers, strict=True):
            assert own == [*counted(cut, tokens).values()], (cut, type(fields))
        for rule in SPLITS:  # they divide the tokens
            rows = [1 + cuts.index(cut) for cut in named[rule.name]]
            assert (counts.count_CK[rows].sum(axis=0) == counts.count_CK[0]).all(), rule.name


def test_slices_have_tokens_enough_and_divide_any_later_step():
    """The head has short and long sequences: a bucket may have fewer tokens than the last."""
    rng, counts, tokens = np.random.default_rng(0), Counts(), []
    ages, envs = [0, 0, 0, 1, 2, 3], ["a", "a", "a", "b", "c", ""]
    labels = {"env": lambda s: envs[s % 6], "replica": lambda s: str(s % 2)}
    for n, turns, size in ((12, 2, 9), (4, 9, 62)):
        how = {"labels": labels, "staleness": lambda s: ages[s // 2 % 6]}
        head = made.rollouts(rng, 1, n, turns=turns, turn_tokens=size, **how)
        counts.add(paired(head, 0))
        mask_ST, stale_ST = (x.reshape(n, -1) for x in (head.mask_N, head.per_token["staleness"]))
        for s in range(n):
            own = {name: of(s) for name, of in labels.items()}
            tokens += tokens_of(mask_ST[s], own, stale_ST[s])
    # what an oracle counts in the narrowest slices, and one more: there a count off by one shows
    narrow = Counter(("turn", min(t["context.turn"], 4)) for t in tokens)
    narrow.update(("stale", min(t["outcome.staleness"], 2)) for t in tokens)
    narrow.update(("env", t["labels.env"]) for t in tokens)
    for name in ("position", "length"):
        narrow.update((name, bisect([16, 64, 256], t[f"context.{name}"])) for t in tokens)
    narrow["length", "short"] = sum(t["context.length"] < 256 for t in tokens)
    later = [
        {"context.turn": turn, "context.turn_position": i, "context.position": i}
        | {"context.length": n, "outcome.staleness": age}
        for turn, age in ((1, 0), (2, 1), (3, 2), (4, 3), (5, 9), (9, 99))
        for i, n in ((0, 0), (2, 255), (15, 256), (16, 257), (255, 10**6), (10**6, 4096))
    ]
    for needed in {n + more for n in narrow.values() for more in (0, 1)}:
        cuts = cuts_of(rules_of(counts, needed)[0], corpus_of("made", ()))
        for cut in (cut for name, of in cuts.items() if name != "all" for cut in of):
            assert sum(met(cut.terms, token) is True for token in tokens) >= needed, cut
        for family in ("turn", "stale", "position", "length", "start"):
            some = [c for name, of in cuts.items() if name.startswith(family) for c in of]
            some = [c for c in some if c.name != "start-1"]  # it may be the only one left out
            for token in later if some else ():
                start = token["context.turn"] > 1 and token["context.turn_position"] < 3
                inside = sum(met(cut.terms, token) is True for cut in some)
                assert inside == (start if family == "start" else 1), (token, some)
    for steps in (1, 3):
        for needed in (len(tokens) // 50, len(tokens) // 9, 2 * len(tokens), 40 * len(tokens)):
            window, rules, _ = run_slices(counts, needed, steps)
            assert window * len(tokens) >= needed * steps  # it decides the whole
            for cut in (cut for of in cuts_of(rules, corpus_of("x", ())).values() for cut in of):
                inside = sum(met(cut.terms, token) is True for token in tokens)
                assert window * inside >= needed * steps, cut
