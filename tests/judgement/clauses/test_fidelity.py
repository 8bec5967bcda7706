# Fidelity on kernels whose truth is known: samplers that depend on the text, banned tokens, and
# reports of another law; how often an honest kernel is rejected, and what a verdict says it saw.

import math
from dataclasses import replace

import numpy as np
import pytest

from servanda.contract.model import WHOLE, Clause
from servanda.judgement.clauses.base import Cell, Interim, View
from servanda.judgement.clauses.fidelity import SamplerFidelity, ServedFidelity, log_evidence
from servanda.judgement.clauses.guards import refuted
from servanda.judgement.slices.rules import Cut
from servanda.theory.sampling import columns_of, draw
from servanda.theory.stats.bets import Refutation
from servanda.theory.stats.cells import TILTS, Cells
from servanda.theory.stats.pit import log_bets
from servanda.traces.token_history import SETS, sets_of, with_history
from servanda.traces.trace import Trace, TracePair
from tests import oracles

V, WIDTH, ALL = 32, 24, Cut(WHOLE)
LOOK = Interim(alpha=0.05, cells=10, first=1, launched=1000)
PRICE = LOOK.log_price_violated


def chain(seed=1, spread=1.0):
    """Logprobs of a Markov chain over V tokens, [V, V]."""
    z = np.random.default_rng(seed).normal(size=(V, V)) * spread
    return z - np.log(np.exp(z).sum(axis=1, keepdims=True))


def lied(logp, tv, seed=2):
    """A chain that is `tv` from it at every context, up and down at random."""
    sign = np.random.default_rng(seed).choice([-1.0, 1.0], size=logp.shape)
    low, high = 0.0, 20.0
    for _ in range(50):
        middle = (low + high) / 2
        q = np.exp(logp + middle * sign)
        q /= q.sum(axis=1, keepdims=True)
        apart = 0.5 * np.abs(q - np.exp(logp)).sum(axis=1).mean()
        low, high = (middle, high) if apart < tv else (low, middle)
    return np.log(q)


def penalty(kind, size):
    """What a sampler draws from after the texts, [S, V], from what it reports."""

    def bias(logp_SV, texts, prompt):
        logp_SV = logp_SV.copy()
        for row, text in enumerate(texts):
            had = sorted({*(text if kind != "answer" else text[prompt:])})
            if kind == "ban":
                logp_SV[row, size] = -np.inf
            elif kind == "repetition":
                logp_SV[row, had] *= size
            else:
                logp_SV[row, had] -= size
        return logp_SV

    return bias


def drawn(groups, seed, *, reported=None, real=None, bias=None, train=None, uniform=None):
    """A view of what a chain drew, as a round records it.

    Args:
        real: the chain that is drawn from, default the reported one; bias: changes it by the text.
        train: the chain of the train kernel, default the reported one.
    """
    reported = chain() if reported is None else reported
    real = reported if real is None else real
    train = reported if train is None else train
    rng = np.random.default_rng(seed)
    prompts = rng.integers(0, V, (groups, 6)).tolist()
    texts = [[*p] for p in prompts]
    for _ in range(WIDTH):
        logp_SV = real[[text[-1] for text in texts]]
        logp_SV = bias(logp_SV, texts, 6) if bias else logp_SV
        for text, token in zip(texts, draw(logp_SV, rng.random(groups)), strict=True):
            text.append(int(token))
    token_N = np.array([t for text in texts for t in text[6:]])
    before_N = np.array([t for text in texts for t in text[5:-1]])

    def side(logp):
        length_S = np.full(groups, WIDTH)
        no = np.zeros(groups, dtype=bool)
        rows = (np.arange(groups), length_S, no, np.full(groups, 6))
        trace = Trace(*rows, token_N, columns_of(logp[before_N], token_N), {"capture": "float64"})
        return with_history(trace, prompts)

    return View(
        pair=TracePair(side(reported), side(train)),
        columns={},
        group_N=np.repeat(np.arange(groups), WIDTH),
        group_S=np.arange(groups),
        launched=groups,
        width=WIDTH,
        may_meet={ALL: np.ones(groups, dtype=bool)},
        uniform_N=rng.random(groups * WIDTH),
    )


def cell_of(kind):
    metric = "sampler_fidelity" if isinstance(kind, SamplerFidelity) else "served_fidelity"
    clause = Clause.model_validate({"id": "fidelity", "metric": metric})
    return Cell(clause, "observability", (), ALL, "realised", WIDTH, kind)


def judged(views, kind=None):
    kind = kind or SamplerFidelity()
    cell = cell_of(kind)
    rounds = [kind.weigh(cell, view) for view in views]
    return kind.judge(cell, rounds, None, LOOK), kind.unexamined(cell, rounds, LOOK)


def rounds(runs, seed=0, **how):
    return [drawn(32, 1000 * seed + i, **how) for i in range(runs)]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("kind", [SamplerFidelity(), ServedFidelity()], ids=["infer", "train"])
@pytest.mark.parametrize(
    ("bias", "says"),
    [
        (penalty("repetition", 1.3), "repetition, presence or frequency penalty"),
        (penalty("text", 0.6), "repetition, presence or frequency penalty"),
        (penalty("answer", 0.6), "repetition, presence or frequency penalty"),
        (penalty("text", -0.6), "repetition, presence or frequency penalty"),
        (penalty("ban", 7), "token id 7 (or one that is 7 more than a multiple of 2,047) came 0"),
    ],
    ids=["repetition", "presence", "presence in the answer", "favoured", "banned"],
)
def test_what_depends_on_the_text_or_is_never_drawn_is_seen_and_named(kind, bias, says):
    verdict, _ = judged(rounds(8, bias=bias), kind)
    assert verdict.outcome == "violated"
    assert says in verdict.note
    healthy, limits = judged(rounds(8), kind)
    assert healthy.outcome == "holds"
    assert len(limits) == 2 and "a repetition penalty of 1." in limits[0]


@pytest.mark.parametrize(("drawn_at", "outcome"), [(1.0, "holds"), (0.5, "violated")])
def test_speculation_is_seen_where_it_moves_the_law_and_only_there(drawn_at, outcome):
    """Drafts of 1.5 times the temperature are accepted by their own probabilities, or others."""

    def at(temperature):
        p = np.exp(chain() / temperature)
        return p / p.sum(axis=1, keepdims=True)

    laws = zip(at(1.0), at(1.5), at(1.5 * drawn_at), strict=True)
    real = np.log([oracles.rejection_sampled(*law) for law in laws])

    assert np.allclose(real, chain()) == (drawn_at == 1.0)
    assert judged(rounds(8, real=real), ServedFidelity())[0].outcome == outcome


def test_repeated_ngrams_that_are_never_drawn_are_seen():
    def no_ngrams(logp_SV, texts, _):
        logp_SV = logp_SV.copy()
        for row, text in enumerate(texts):
            for i in range(len(text) - 2):
                if text[i : i + 2] == text[-2:]:
                    logp_SV[row, text[i + 2]] = -np.inf
        return logp_SV

    peaked = chain(spread=2.5)
    verdict, _ = judged(rounds(8, reported=peaked, bias=no_ngrams))
    assert verdict.outcome == "violated"
    assert judged(rounds(8, reported=peaked))[0].outcome == "holds"


@pytest.mark.slow
@pytest.mark.parametrize("kind", [SamplerFidelity(), ServedFidelity()], ids=["infer", "train"])
def test_a_report_of_another_law_is_seen_or_its_size_is_stated(kind):
    """Markov chains that report train's logprobs and draw at TV .10 and .03 from them."""
    report = chain()
    caught, _ = judged(rounds(16, real=lied(report, 0.10)), kind)
    assert caught.outcome == "violated"
    missed, limits = judged(rounds(16, real=lied(report, 0.03)), kind)
    assert missed.outcome == "holds"
    least = float(limits[1].split("(less than ")[1].split()[0])
    assert 0.03 <= least <= 0.12


def test_the_mean_of_every_factor_is_one_or_less_by_enumeration():
    """Every token of a position in its turn, weighed by its mass: the price is neither slack."""
    rng = np.random.default_rng(5)
    for _ in range(20):
        mass_V = np.sort(rng.dirichlet(np.full(20, 0.4)))[::-1]
        ids_V = rng.permutation(20)
        mass_NK, ids_NK = (np.tile(of_V[:16], (20, 1)) for of_V in (mass_V, ids_V))
        in_K = rng.random(16) < 0.4
        set_N = np.full(20, mass_V[:16][in_K].sum())
        hit_N = np.isin(ids_V, ids_V[:16][in_K])
        assert np.allclose(np.exp(log_bets(set_N, set_N, hit_N)) @ mass_V, 1.0, atol=1e-9)
        means = 0.0
        for row, share in enumerate(mass_V):
            one = slice(row, row + 1)
            cells = Cells.of(ids_NK[one], mass_NK[one], ids_V[one], np.array([3]))
            means = means + share * np.exp(cells.growth)
        assert (means <= 1 + 1e-6).all()
        for tilt, least in ((0.1, 0.98), (1.0, 0.8)):  # larger ones lose more to 1 + x <= exp x
            weak = np.tile(tilt > TILTS, len(means) // len(TILTS))
            assert (means[weak] > least).all()


@pytest.mark.slow
def test_honest_kernels_are_rejected_no_more_often_than_the_price():
    """At e^2 a mixture of e-values is reached by at most 13.5 % of runs, whatever their length."""
    kind, reached = SamplerFidelity(), 0
    cell, runs = cell_of(kind), 100
    for seed in range(runs):
        found = [kind.weigh(cell, drawn(4, 7919 * seed + i))["infer"] for i in range(3)]
        reached += log_evidence(found)[0] >= 2.0
    assert reached <= 0.135 * runs + 3 * math.sqrt(0.135 * 0.865 * runs)


@pytest.mark.slow
def test_a_train_kernel_that_differs_rejects_no_honest_sampler():
    """Importance weights: 16 runs at TV .02 and .08, none beyond a price of e^6.3."""
    for tv in (0.02, 0.08):
        for seed in range(8):
            views = rounds(3, seed=seed, train=lied(chain(), tv, seed=seed))
            assert judged(views, ServedFidelity())[0].outcome == "holds"


def stated(limits):
    """Temperature off by, presence and repetition penalty that the first sentence names."""
    words = limits[0].replace(",", "").replace(";", "").split()
    off = float(words[words.index("off") + 2]) / 100
    return off, *(float(words[words.index(kind) + 3]) for kind in ("presence", "repetition"))


def warmed(logp, times):
    warm = logp / times
    return warm - np.log(np.exp(warm).sum(axis=1, keepdims=True))


def rate(runs, **how):
    found = [judged(rounds(6, seed=s, **how))[0].outcome for s in range(runs)]
    return found.count("violated") / runs


@pytest.mark.slow
def test_the_stated_penalty_is_rejected_in_most_runs_and_half_of_it_in_fewer():
    off, presence, repetition = stated(judged(rounds(6, seed=99))[1])
    assert 1 < repetition < 2 and 0 < presence < 2 and 0 < off < 0.5
    assert rate(8, bias=penalty("repetition", repetition)) >= 0.75
    assert rate(8, bias=penalty("repetition", (1 + repetition) / 2)) <= 0.5


@pytest.mark.slow
def test_the_stated_strengths_are_rejected_in_nine_of_ten_runs_and_a_quarter_in_fewer():
    off, presence, _ = stated(judged(rounds(6, seed=99))[1])
    for strong, weak in (
        ({"bias": penalty("answer", presence)}, {"bias": penalty("answer", presence / 4)}),
        ({"real": warmed(chain(), 1 - off)}, {"real": warmed(chain(), 1 - off / 4)}),
    ):
        # of 40 runs at 0.9, fewer than 30 have a chance of 1 in 200
        assert rate(40, **strong) >= 0.75
        assert rate(40, **weak) <= 0.6


@pytest.mark.slow
@pytest.mark.parametrize("missing", [6, 12, 400])  # of the last one nothing is seen, and said
def test_the_stated_strength_is_rejected_beside_missing_tokens(missing):
    """Each missing token is charged; what is said to be rejected is, at that charge."""
    kind = SamplerFidelity()
    cell = cell_of(kind)

    def verdict(seed, **how):
        views = [lossy(view, missing // 6) for view in rounds(6, seed=seed, **how)]
        found = [kind.weigh(cell, view) for view in views]
        return kind.judge(cell, found, None, LOOK), kind.unexamined(cell, found, LOOK)

    limits = verdict(99)[1]
    assert ("no temperature" in limits[0]) == (missing == 400)
    if missing == 400:
        return
    off, *_ = stated(limits)
    assert off > stated(judged(rounds(6, seed=99))[1])[0]
    outcomes = [verdict(s, real=warmed(chain(), 1 - off))[0].outcome for s in range(8)]
    assert outcomes.count("violated") >= 6


def lossy(view, missing):
    """Some tokens of a view have neither rank nor likeliest tokens."""
    gone_N = np.arange(len(view.pair.infer.token_N)) < missing
    columns = {
        name: np.where(gone_N, np.nan, values) for name, values in view.pair.infer.columns.items()
    }
    return replace(view, pair=TracePair(replace(view.pair.infer, columns=columns), view.pair.train))


def test_where_train_draws_too_both_are_stated_at_the_price_that_they_share():
    kind, views = SamplerFidelity(), rounds(6, seed=99)
    cell = cell_of(kind)
    alone = [kind.weigh(cell, view) for view in views]
    both = [{**found, "train": found["infer"]} for found in alone]

    of_infer, of_train = (kind.unexamined(cell, found, LOOK) for found in (alone, both))

    assert len(of_train) == 2 * len(of_infer)
    assert of_train[2].startswith("fidelity of train's own tokens would have rejected")
    assert stated(of_train)[0] >= stated(of_infer)[0]


def test_draws_that_depend_on_the_token_before_accuse_no_single_id():
    """Each id is drawn as often as reported, and after its like never."""
    even = np.full((V, V), -np.log(V))
    real = np.where(np.eye(V, dtype=bool), -np.inf, -np.log(V - 1))

    verdict, _ = judged(rounds(24, reported=even, real=real))

    assert verdict.outcome == "violated"
    assert "depends on the token before" in verdict.note


def test_a_record_without_likeliest_tokens_says_that_it_did_not_look():
    views = []
    for view in rounds(4, bias=penalty("text", 2.0)):
        kept = {"logp", "mass_before"}
        infer = view.pair.infer
        bare = replace(infer, columns={k: v for k, v in infer.columns.items() if k in kept})
        views.append(replace(view, pair=TracePair(bare, view.pair.train)))
    kind = SamplerFidelity()
    cell = cell_of(kind)
    found = [kind.weigh(cell, view) for view in views]
    assert all(not r["infer"].cells.n and not r["infer"].sets.n for r in found)
    (text,) = kind.unexamined(cell, found, LOOK)
    assert text.startswith("fidelity: the record holds no likeliest tokens")

    of_train = [kind.weigh(cell, view)["infer"] for view in rounds(4)]
    both = [{**r, "train": train} for r, train in zip(found, of_train, strict=True)]
    first, *more = kind.unexamined(cell, both, LOOK)
    assert first == text and len(more) == 2  # what train's record shows says nothing of infer's


def test_rounds_with_and_without_the_columns_may_follow_each_other():
    """A run that an older version began: its rounds bet nothing on sets, and the rest does."""
    views = rounds(8, bias=penalty("text", 1.0))
    infer = views[0].pair.infer
    old = {k: v for k, v in infer.columns.items() if not k.startswith(("in.", "id.", "logp."))}
    first = replace(views[0], pair=TracePair(replace(infer, columns=old), views[0].pair.train))
    verdict, _ = judged([first, *views[1:]])
    assert verdict.outcome == "violated" and "penalty" in verdict.note


def test_sets_are_those_of_the_text_before_each_token():
    rng = np.random.default_rng(0)
    for _ in range(20):
        length_S = rng.integers(0, 9, 5)
        length_S[0] = 5
        prompts = [rng.integers(0, 6, rng.integers(1, 6)).tolist() for _ in range(5)]
        n = int(length_S.sum())
        token_N = rng.integers(0, 6, n)
        columns = {f"id.{k}": rng.integers(0, 6, n).astype(float) for k in range(3)}
        columns |= {f"logp.{k}": np.full(n, -2.0) for k in range(3)}
        none_S = np.zeros(5, dtype=bool)
        prompt_S = np.array([len(p) for p in prompts])
        trace = Trace(np.arange(5), length_S, none_S, prompt_S, token_N, columns)
        found = with_history(trace, prompts)
        expected = {name: [] for name in SETS}
        ids_NK = found.best[0]
        for prompt, tokens in zip(prompts, trace.continuations, strict=True):
            for at in range(len(tokens)):
                text, row = [*prompt, *tokens[:at]], len(expected["text"])
                follows = {
                    text[i + 2] for i in range(len(text) - 2) if text[i : i + 2] == text[-2:]
                }
                expected["text"].append([i in text for i in ids_NK[row]])
                expected["answer"].append([i in tokens[:at] for i in ids_NK[row]])
                expected["often"].append([text.count(i) >= 3 for i in ids_NK[row]])
                expected["ngram"].append([i in follows for i in ids_NK[row]])
        for name in SETS:
            assert np.array_equal(sets_of(found, name), np.array(expected[name])), name


@pytest.mark.parametrize(
    ("largest", "now", "outcome", "more"),
    [
        (0.9, 0.5, "holds", None),  # it was near, and is not any more
        (0.9, 0.8, "inconclusive", 250),
        (0.99, 0.999, "inconclusive", 2),
        (1.0, 0.2, "violated", None),
    ],
)
def test_a_run_does_not_end_while_a_check_is_near_a_rejection(largest, now, outcome, more):
    """Evidence grows with the run: 1,000 groups that gave 0.8 of a threshold need 250 more."""
    cell, evidence = cell_of(SamplerFidelity()), Refutation(100, (0.0,))

    found = refuted(cell, evidence, largest * PRICE, LOOK, "why", now=now * PRICE)

    assert (found.outcome, found.open, found.more) == (outcome, more is not None, more)


def test_a_penalty_is_rejected_by_the_run_that_the_check_kept_open():
    """Near a rejection after nine rounds, a run with a penalty of 0.2 nats goes on, and rejects."""
    views = [drawn(16, 60 + i, bias=penalty("answer", 0.2)) for i in range(12)]
    outcomes = [judged(views[: n + 1])[0].outcome for n in range(len(views))]

    assert outcomes == ["holds"] * 8 + ["inconclusive"] * 2 + ["violated"] * 2
