# Guards that refute: coherence on whole runs, fidelity where only the best tokens are reported.

from dataclasses import replace

import numpy as np
import pytest

from servanda.contract.model import WHOLE, Clause, Kernel
from servanda.engines.table import TableEngine
from servanda.judgement.clauses.base import GUARDS, Cell, Interim, View
from servanda.judgement.clauses.fidelity import SamplerFidelity
from servanda.judgement.clauses.guards import Coherent
from servanda.judgement.slices.rules import Cut
from servanda.report.explain.contract import explain_guard
from servanda.runner import run
from servanda.theory.divergence.precision import rounded
from servanda.theory.sampling import Sampling, processed_logprobs
from servanda.theory.stats.bets import LEAK
from servanda.theory.stats.pit import log_densities
from servanda.traces.trace import Batch, Trace, TracePair
from tests import kit

COHERENT = Clause.model_validate({"id": "coherent", "metric": "coherence"})
GUARD = "observability: {clauses: [{id: coherent, metric: weight_mean_check}]}"
COLD = ", sampling: {temperature: 0.5}"
RAW = Sampling()


def checked(tmp_path, **sides):
    path, _ = kit.write(
        tmp_path, q={"": kit.BASE}, limit=0.4, more=GUARD, first=320, last=640, **sides
    )
    verdict = run.check(path, run_dir=tmp_path / "run", open=run.in_process)
    return {cell.clause: cell for cell in verdict.cells}


@pytest.mark.slow
@pytest.mark.parametrize(
    "sides",
    [
        # infer draws at .5 and reports raw logprobs, train reports processed ones
        {"infer": ", fault: {undisclosed_temperature: 0.5}", "train": COLD},
        {"infer": ", fault: {undisclosed_top_p: 0.7}", "train": ", sampling: {top_p: 0.7}"},
        # train at yet another temperature than the one that infer draws at and does not report
        {
            "infer": ", fault: {undisclosed_temperature: 0.3}",
            "train": ", sampling: {temperature: 0.7}",
        },
        {"infer": ", fault: {off_by_one_shift: 1}"},
        {"train": ", fault: {off_by_one_shift: 1}"},
    ],
)
def test_logprobs_of_no_two_distributions_are_refuted(tmp_path, sides):
    cells = checked(tmp_path, **sides)
    assert cells["coherent"].outcome == "violated"
    assert cells["coherent"].kind == "guard"
    assert "raw logprobs on one side and processed ones on the other" in cells["coherent"].note
    assert cells["tv"].outcome == "inconclusive"
    assert "precondition failed" in cells["tv"].note and "coherent" in cells["tv"].note


def test_another_temperature_of_train_is_another_distribution_and_not_refuted(tmp_path):
    cells = checked(tmp_path, train=COLD)
    assert cells["coherent"].outcome == "holds"
    assert cells["coherent"].note == "not rejected"
    assert cells["tv"].value == pytest.approx(0.16, abs=0.03)


def test_lost_sequences_do_not_look_incoherent(tmp_path):
    cells = checked(tmp_path, infer=", fault: {lost_sequences: 0.5}")
    assert cells["coherent"].outcome == "holds"
    assert cells["coherent"].missing > 0


@pytest.mark.parametrize("capture", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("coarse", ["infer", "train"])
def test_one_kernel_whose_record_is_rounded_is_not_incoherent(capture, coarse):
    """Tables of one row: rounding moves every weight of a token the same way, 40,000 times."""
    mass = np.array([0.299, 0.169, 0.085, 0.355, 0.092])
    token_N = np.random.default_rng(3).choice(len(mass), 40_000, p=mass)
    exact = np.log(mass)[token_N]
    kept = {"infer": exact, "train": exact, coarse: rounded(exact, capture)}
    cell = Cell(COHERENT, "observability", (), ALL, "realised", 1, Coherent())
    view = together(kept["infer"], kept["train"], token_N)
    verdict = cell.kind.judge(cell, [cell.kind.weigh(cell, view)], None, LOOK)
    assert verdict.outcome == "holds" and verdict.e_violated <= 1e-3


def test_a_declared_precision_goes_before_what_the_values_look_like():
    """Exact powers of 2 look coarse; in a record of float64 they are what they say."""
    infer_N = np.full(2000, -1.0)
    train_N = infer_N + 2.0**-8  # w is above 1 by half of what bfloat16 may be off by
    cell = Cell(COHERENT, "observability", (), ALL, "realised", 1, Coherent())
    about = {"capture": "float64"}
    seen = cell.kind.weigh(cell, together(infer_N, train_N, np.zeros(2000, int), about))
    unseen = cell.kind.weigh(cell, together(infer_N, train_N, np.zeros(2000, int)))
    assert seen.log_e > 1 and unseen.log_e < 0


def together(infer_N, train_N, token_N, about=None):
    """A view of sequences of one token each, that two records concern."""
    n = len(token_N)
    one_S, no_S = np.ones(n, dtype=np.int64), np.zeros(n, dtype=bool)
    infer, train = (
        Trace(np.arange(n), one_S, no_S, one_S, token_N, {"logp": logp_N}, about or {})
        for logp_N in (infer_N, train_N)
    )
    return View(
        pair=TracePair(infer, train),
        columns={},
        group_N=np.arange(n),
        group_S=np.arange(n),
        launched=n,
        width=1,
        may_meet={ALL: np.ones(n, dtype=bool)},
    )


def test_coherence_is_judged_only_where_it_is_written(tmp_path):
    path, _ = kit.write(tmp_path)
    verdict = run.check(path, run_dir=tmp_path / "run", open=run.in_process)
    assert "coherence" not in {cell.metric for cell in verdict.cells}
    assert "it applies only where it is written" in (explain_guard("coherence") or "")
    assert "even if it is not written" in (explain_guard("sampler_fidelity") or "")


NAMES = [*"abcdefghijklmnopqrstuvwx", "<eos>"]
ZIPF = (1 / np.arange(1, len(NAMES) + 1) ** 1.3 / (1 / np.arange(1, 26) ** 1.3).sum()).tolist()
TURNED = {"": [ZIPF[0], *ZIPF[:0:-1]]}
ALL = Cut(WHOLE)
LOOK = Interim(alpha=0.025, cells=1, first=1, launched=1)


def served(folder, sequences, *, reported=RAW, real=RAW, k=5, draws=None, columns=True, seed=1):
    """What a server that returns its best tokens leaves of a round: no ranks, no PIT.

    Args:
        draws: the table that is really drawn from; by default the reported one.
        columns: whether the best tokens are returned at all.
    """
    folder.mkdir(exist_ok=True)
    table = kit.table(folder, "told.json", {"": ZIPF}, tokens=NAMES)
    kit.table(folder, "real.json", draws or {"": ZIPF}, tokens=NAMES)
    told, drawn = (
        TableEngine(Kernel(engine="table", model=str(folder / name)))
        for name in ("told.json", "real.json")
    )
    launched = tuple(range(sequences))
    batch = Batch(launched, ((0,),) * sequences, 20)
    new = drawn.generate(batch, real, seed).continuations
    trace = told.score(Batch(launched, batch.prompts, 20, new), reported, "decode")
    n = len(trace.token_N)
    logp_V = processed_logprobs(table.logits_CV, reported)[0]
    best = {}
    for i, token in enumerate(np.argsort(-logp_V, kind="stable")[:k]):
        best |= {f"id.{i}": np.full(n, float(token)), f"logp.{i}": np.full(n, logp_V[token])}
    infer = Trace(
        *(trace.sequence_S, trace.length_S, trace.lost_S, trace.prompt_tokens_S, trace.token_N),
        columns={"logp": trace.columns["logp"], **(best if columns else {})},
    )
    return View(
        pair=TracePair(infer, infer),
        columns={},
        group_N=np.repeat(np.arange(sequences), infer.length_S),
        group_S=np.arange(sequences),
        launched=sequences,
        width=20,
        may_meet={ALL: np.ones(sequences, dtype=bool)},
    )


def judged(*views):
    kind = SamplerFidelity()
    clause = Clause.model_validate({"id": "fidelity", "metric": "sampler_fidelity"})
    cell = Cell(clause, "observability", (), ALL, "realised", 20, kind)
    return kind.judge(cell, [kind.weigh(cell, view) for view in views], None, LOOK)


@pytest.mark.parametrize(
    ("how", "sequences"),
    [
        ({"real": Sampling(temperature=0.95)}, 1200),
        ({"real": Sampling(top_p=0.95)}, 400),
        ({"real": Sampling(temperature=0.6)}, 6),  # raw logprobs of what was drawn processed
        ({"reported": Sampling(temperature=0.6)}, 6),
    ],
)
def test_an_undisclosed_transform_is_seen_in_reported_best_tokens(tmp_path, how, sequences):
    verdict = judged(served(tmp_path, sequences, **how))
    assert verdict.outcome == "violated", verdict
    assert "do not follow the reported distribution" in verdict.note


@pytest.mark.parametrize(
    ("guard", "side"), [("sampler_fidelity", "infer"), ("served_fidelity", "train")]
)
def test_a_token_lies_anywhere_within_its_own_mass(guard, side):
    """By a fresh uniform: a fixed place would leave gaps that the honest never fill."""
    own, before, uniform = (np.array(a) for a in ([0.5, 0.2], [0.1, 0.7], [0.3, 0.9]))
    view = together(np.log(own), np.log(own), np.zeros(2, dtype=int))
    getattr(view.pair, side).columns["mass_before"] = before
    view = replace(view, uniform_N=uniform)
    kind = GUARDS[guard]()
    clause = Clause.model_validate({"id": "it", "metric": guard})
    found = kind.weigh(Cell(clause, "observability", (), ALL, "realised", 1, kind), view)

    u = log_densities(np.array([0.1 + 0.3 * 0.5, 0.7 + 0.9 * 0.2]))
    if guard == "sampler_fidelity":
        assert found["infer"].ranks.growth == pytest.approx(u.sum(axis=1))
    else:  # each weight is taken at its lower end
        expected = np.log((1 - LEAK) * np.exp(u) + LEAK).sum(axis=1)
        assert found.ranks.growth == pytest.approx(expected, abs=1e-5)


def test_a_mix_up_of_raw_and_processed_is_seen_in_some_fifty_tokens(tmp_path):
    views = [served(tmp_path, 1, real=Sampling(temperature=0.6), seed=s) for s in range(40)]
    needed = next(n for n in range(1, 41) if judged(*views[:n]).outcome == "violated")
    assert sum(len(view.pair.infer.token_N) for view in views[:needed]) <= 80


@pytest.mark.slow
@pytest.mark.parametrize("honest", [RAW, Sampling(temperature=0.8, top_p=0.9)])
def test_an_honest_server_is_not_rejected_at_any_look(tmp_path, honest):
    """40 runs of five rounds, at 2.5 %: a count beyond 5 has a chance of one in a thousand."""
    wrong = 0
    for seed in range(40):
        views = [
            served(tmp_path, 8, reported=honest, real=honest, seed=100 * seed + i) for i in range(5)
        ]
        verdict = judged(*views)
        wrong += verdict.outcome == "violated"
        assert verdict.note in ("not rejected", SamplerFidelity.rejection)
    assert wrong <= 5


def test_a_permuted_tail_is_not_seen_with_the_best_token_alone(tmp_path):
    """The known blind spot: within a cell no one looks."""
    apart = 0.5 * np.abs(np.array(TURNED[""]) - ZIPF).sum()
    assert apart > 0.3
    assert judged(served(tmp_path, 300, k=1, draws=TURNED)).outcome == "holds"
    assert judged(served(tmp_path, 300, k=5, draws=TURNED)).outcome == "violated"


def test_without_ranks_and_best_tokens_the_guard_stays_open_and_says_why(tmp_path):
    verdict = judged(served(tmp_path, 20, columns=False))
    assert (verdict.outcome, verdict.open) == ("inconclusive", False)
    assert verdict.note == (
        "infer records neither where its tokens rank nor its best tokens, so no one can tell what "
        "it draws from: let it report top logprobs"
    )
    assert verdict.n == 0 and verdict.missing > 0


SERVED = "observability: {clauses: [{id: served, metric: served_fidelity}]}"


def without_ranks(kernel, side):
    """Kernels of which infer reports each token's own logprob and no more."""
    engine = run.in_process(kernel, side)
    if side == "infer":
        generate = engine.generate

        def bare(*asked):
            trace = generate(*asked)
            return replace(trace, columns={"logp": trace.columns["logp"]})

        engine.generate = bare
    return engine


@pytest.mark.parametrize(
    ("fault", "outcome"),
    [("", "holds"), (", fault: {undisclosed_temperature: 0.5}", "violated")],
)
def test_train_sees_the_sampler_where_infer_reports_only_its_tokens(tmp_path, fault, outcome):
    path, _ = kit.write(
        tmp_path, q={"": kit.BASE}, limit=0.4, more=SERVED, first=640, last=640, infer=fault
    )
    verdict = run.check(path, run_dir=tmp_path / "run", open=without_ranks)
    cells = {cell.clause: cell for cell in verdict.cells}
    assert cells["served"].outcome == outcome
    assert "sampler_fidelity" not in cells  # nothing could be said of it
    if outcome == "violated":
        assert "as train ranks them" in cells["served"].note
