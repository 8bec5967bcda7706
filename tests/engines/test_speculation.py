# Kernels that verify drafts: what they draw, against the laws of their tables, by enumeration.

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from servanda.contract.model import Kernel
from servanda.engines import open_engine
from servanda.engines.faults import SPECULATION_FAULTS
from servanda.errors import MeasurementError
from servanda.runner import run
from servanda.theory.sampling import Sampling
from servanda.theory.speculation import Verification
from servanda.traces.trace import Batch
from tests import kit, oracles
from tests.theory.test_speculation import at_temperature, decided

MODEL = Path(__file__).parents[2] / "models" / "tiny-lm"
TARGET = {
    "": [0.35, 0.25, 0.25, 0.15, 0.0],
    "a": [0.1, 0.45, 0.3, 0.15, 0.0],
    "b": [0.55, 0.1, 0.2, 0.15, 0.0],
}
DRAFT = {
    "": [0.5, 0.2, 0.15, 0.15, 0.0],
    "a": [0.3, 0.3, 0.25, 0.15, 0.0],
    "b": [0.4, 0.3, 0.15, 0.15, 0.0],
}
WIDTH, LONGEST, PROMPT = 5, 3, (0,)
# as the catalogue breaks it, but for "", which is nothing
RULES = {
    ("", None): Verification(),
    ("draft_acceptance_rule", "law_kept"): Verification(accepts="target", replaces="others"),
    ("draft_acceptance_rule", "law_broken"): Verification(accepts="target"),
    ("draft_residual", "target"): Verification(replaces="target"),
    ("draft_residual", "unnormalised"): Verification(replaces="unnormalised"),
    ("draft_temperature", 0.5): Verification(drawn_at=0.5),
    ("draft_verification_temperature", 0.5): Verification(read_at=0.5),
    ("draft_bonus", "draft"): Verification(bonus="draft"),
    ("draft_bonus", "none"): Verification(bonus="none"),
}
KEPT = {("", None), ("draft_acceptance_rule", "law_kept"), ("draft_bonus", "none")}


def law_of(rows):
    return lambda text: rows.get(kit.TOKENS[text[-1]], rows[""])


def config(**more):
    method = "draft_model" if "model" in more else "ngram"
    return {"method": method, "num_speculative_tokens": LONGEST, **more}


@pytest.fixture
def tables(tmp_path):
    kit.table(tmp_path, "p.json", TARGET)
    kit.table(tmp_path, "draft.json", DRAFT)

    def opened(fault=None, sample="probabilistic", options=True, **kernel):
        drafts = config(model=str(tmp_path / "draft.json"), draft_sample_method=sample)
        speculative = {"options": {"speculative_config": drafts}} if options else {}
        model = str(tmp_path / "p.json")
        return open_engine(
            Kernel(engine="table", model=model, fault=fault, **speculative, **kernel)
        )

    return opened


def many(n, width=WIDTH):
    return Batch(tuple(range(n)), (PROMPT,) * n, width)


@pytest.mark.parametrize("fault", RULES, ids=str)
def test_what_a_kernel_draws_has_the_law_that_enumeration_gives(tables, fault):
    """Each text of five tokens, by a chi-square of all that are expected ten times or more."""
    name, value = fault
    rule = RULES[fault]
    target, draft = law_of(TARGET), law_of(DRAFT)
    drawn_by = at_temperature(draft, rule.drawn_at)
    law = oracles.speculative_law(
        target, draft, drawn_by, decided(rule), rule.bonus, LONGEST, PROMPT, WIDTH
    )
    truth = oracles.target_law(target, PROMPT, WIDTH)
    moved = oracles.tv(*zip(*((law.get(t, 0.0), p) for t, p in truth.items()), strict=True))
    assert (moved < 1e-12) == (fault in KEPT)

    n = 2_000
    trace = tables({name: value} if name else None).generate(many(n), Sampling(), 5)

    seen = Counter(trace.continuations)
    assert not {text for text in seen if not law[text]}
    often = [text for text, p in law.items() if n * p >= 10]
    counts = [seen[text] for text in often]
    expected = [n * law[text] for text in often]
    rest = 1 - math.fsum(law[text] for text in often)
    counts, expected = [*counts, n - sum(counts)], [*expected, n * rest]
    assert stats.chisquare(counts, expected, sum_check=False).pvalue > 1e-3
    if moved > 1e-12:  # and it is told from the target's
        shares = [*(truth[text] for text in often), 1 - math.fsum(truth[t] for t in often)]
        rows = zip(counts, expected, shares, strict=True)
        assert math.fsum(c * math.log(e / n / share) for c, e, share in rows if share) > 5


def test_drafts_are_accepted_as_often_as_both_laws_overlap(tables):
    """sum min(p, q) of each context, which is 1 - TV: the exact mean of the first draft tokens."""
    trace = tables().generate(many(4_000, width=2), Sampling(), 5)
    assert not trace.columns["drafted"].any()  # a last token needs none
    trace = tables().generate(many(4_000, width=3), Sampling(), 5)

    drafted, accepted = (trace.columns[c].reshape(-1, 3) for c in ("drafted", "accepted"))
    target, draft, first = law_of(TARGET), law_of(DRAFT), law_of(TARGET)(PROMPT)
    overlap = math.fsum(
        chance * (1 - oracles.tv(target((token,)), draft((token,))))
        for token, chance in enumerate(first)
    )
    assert drafted[:, 1].tolist() == [1.0] * 4_000
    sd = math.sqrt(overlap * (1 - overlap) / 4_000)
    assert accepted[:, 1].mean() == pytest.approx(overlap, abs=4 * sd)


@pytest.mark.parametrize("sample", ["greedy", "probabilistic"])
def test_a_match_draws_token_for_token_what_is_drawn_without_drafts(tables, sample, monkeypatch):
    from servanda.engines.table import TableEngine

    plain = tables(options=False).generate(many(400), Sampling(temperature=0.8), 3)
    monkeypatch.setattr(TableEngine, "_verification", Verification(accepts="match"))

    drawn = tables(sample=sample).generate(many(400), Sampling(temperature=0.8), 3)

    assert drawn.continuations == plain.continuations
    assert drawn.columns["accepted"].sum() > 0


def test_no_sequence_depends_on_its_company(tables):
    engine, batch = tables(), replace(many(60), prompts=tuple((i % 4,) for i in range(60)))
    together = engine.generate(batch, Sampling(top_p=0.9), 9)

    alone = [engine.generate(batch.take([row]), Sampling(top_p=0.9), 9) for row in (0, 17, 59)]

    assert [t.continuations[0] for t in alone] == [together.continuations[r] for r in (0, 17, 59)]


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"model": str(MODEL)},
        {"model": str(MODEL), "dtype": "bfloat16", "draft_sample_method": "probabilistic"},
    ],
    ids=["lookup", "greedy", "probabilistic"],
)
def test_a_real_model_records_what_it_scores(more):
    kernel = Kernel(
        engine="transformers",
        model=str(MODEL),
        prefill_chunk=4,
        options={"speculative_config": config(**more)},
    )
    engine = open_engine(kernel)
    prompts = ((5, 6, 7, 5, 6, 7, 5), (9, 8), (3, 3, 3, 3, 3, 3))
    batch = Batch((0, 1, 2), prompts, 24)

    sampling = Sampling(temperature=0.4)  # such texts repeat themselves
    drawn = engine.generate(batch, sampling, 3)

    given = replace(batch, continuations=drawn.continuations)
    scored = engine.score(given, sampling, "decode")
    assert drawn.columns["logp"] == pytest.approx(scored.columns["logp"], abs=1e-4)
    assert drawn.columns["drafted"].sum() >= drawn.columns["accepted"].sum() > 0
    if "dtype" in more:  # the same weights, rounded
        assert drawn.columns["accepted"].sum() > 0.9 * drawn.columns["drafted"].sum()
    assert (
        engine.describe().digest
        != open_engine(Kernel(engine="transformers", model=str(MODEL))).describe().digest
    )


def test_a_model_that_takes_over_a_matching_rule_draws_what_it_draws_alone(monkeypatch):
    from servanda.engines.transformers import TransformersEngine

    kernel = Kernel(engine="transformers", model=str(MODEL))
    batch = Batch((0, 1), ((5, 6, 7, 5, 6), (3, 3, 3)), 24)
    plain = open_engine(kernel).generate(batch, Sampling(), 11)
    monkeypatch.setattr(TransformersEngine, "_verification", Verification(accepts="match"))
    options = {"speculative_config": config(model=str(MODEL))}

    drawn = open_engine(kernel.model_copy(update={"options": options})).generate(
        batch, Sampling(), 11
    )

    assert drawn.continuations == plain.continuations


def said(engine="transformers", model=MODEL, **kernel):
    with pytest.raises(MeasurementError) as told:
        open_engine(Kernel(engine=engine, model=str(model), **kernel))
    return str(told.value).replace(str(MODEL), "MODEL")


def test_what_cannot_be_drafted_is_refused_with_what_to_write(tmp_path):
    small = kit.table(tmp_path, "small.json", {"": [0.5, 0.5]}, tokens=["a", "<eos>"])
    assert small
    kit.table(tmp_path, "p.json", TARGET)
    assert said(
        options={"speculative_config": {"method": "eagle", "num_speculative_tokens": 3}}
    ) == (
        "speculative_config.method: Input should be 'ngram' or 'draft_model', found 'eagle'\n"
        '  hint: write speculative_config: {"method": "ngram", "num_speculative_tokens": 4, '
        '"prompt_lookup_max": 3}'
    )
    assert said(options={"speculative_config": config(), "offload": "layers"}) == (
        "options.offload and options.speculative_config exclude each other in engine "
        "'transformers'\n  hint: remove one of the two"
    )
    assert said(prefix_cache=16, options={"speculative_config": config()}).startswith(
        "prefix_cache"
    )
    assert said(options={"speculative_config": config(method="draft_model")}) == (
        "speculative_config: method draft_model and no model\n"
        "  hint: a draft_model has `model: FOLDER`, and ngram has none"
    )
    lookup = config(prompt_lookup_min=4, prompt_lookup_max=2)
    assert said(options={"speculative_config": lookup}).endswith("let the minimum be the smaller")
    other = {"speculative_config": config(model=str(tmp_path / "small.json"))}
    assert "has 2 tokens, and the target 5" in said("table", tmp_path / "p.json", options=other)


@pytest.mark.parametrize("name", [*SPECULATION_FAULTS])
def test_a_fault_of_drafts_is_refused_where_nothing_would_break(name):
    fault = {name: SPECULATION_FAULTS[name].default}
    assert said(fault=fault).startswith(
        f"fault '{name}' cannot be injected into a kernel that verifies no drafts"
    )
    if name in ("draft_temperature", "draft_acceptance_rule"):
        certain = {"speculative_config": config()}
        assert "whose drafts are certain of their tokens" in said(fault=fault, options=certain)


# extremes


def test_logprobs_without_a_mass_have_no_error_that_would_overflow(tmp_path):
    """vllm#55005: a sampler that divides by memory never written reports logprobs of -1e36."""
    from servanda.judgement.clauses.top_tokens import Likeliest
    from servanda.theory.sampling import best_columns
    from servanda.traces.trace import Trace

    logp_NK = np.array([[-1e-3, -7.0, -1e36], [-0.5, -1.0, -1e30]])
    columns = {"logp": logp_NK[:, 0], **best_columns(np.array([[1, 2, 3]] * 2), logp_NK)}
    about = {"capture": "float32"}
    trace = Trace.of(Batch((0,), ((5,),), 2), [2], [1, 1], columns, about)

    table = Likeliest.of(trace, np.array([0, 1]), np.ones(2, dtype=bool))

    assert table is not None and table.error < 1e-3
    assert np.isfinite(table.cells(0).growth).all()


# contracts

CHECKED = """observability:
  clauses:
    - {{id: served, metric: served_fidelity}}
runtime:
  clauses:
    - {{id: drafts, metric: draft_acceptance, at_least: {at_least}{more}}}"""


def checked(folder, fault=None, at_least=0.4, more="", **options):
    kit.table(folder, "draft.json", DRAFT)
    drafts = json.dumps(config(model="draft.json", draft_sample_method="probabilistic"))
    infer = f", options: {{speculative_config: {drafts}}}"
    infer += f", fault: {{{fault[0]}: {fault[1]}}}" if fault and fault[0] else ""
    clauses = CHECKED.format(at_least=at_least, more=more)
    tables = {"p": TARGET, "q": TARGET, "bitwise": True, "width": 12}
    path, _ = kit.write(folder, infer=infer, more=clauses, **tables | options)
    verdict = run.check(str(path), run_dir=folder / "run")
    return verdict, {(c.clause, c.slice): c for c in verdict.cells}


# tokens that served_fidelity is given; of these two effects it needs the more
POWER = {("draft_residual", "target"): 2048, ("draft_bonus", "draft"): 2048}


@pytest.mark.parametrize("fault", RULES, ids=str)
def test_served_fidelity_is_violated_by_each_law_that_moved_and_by_no_other(tmp_path, fault):
    groups = POWER.get(fault, 256)
    size = {"first": groups, "last": groups, "round": 256, "claim": "realised"}

    _, cells = checked(tmp_path, fault, at_least=0.01, **size)

    right = "holds" if fault in KEPT else "violated"
    assert cells["served", "all"].outcome == right, cells["served", "all"]


@pytest.mark.parametrize("claim", ["realised", "population"])
def test_a_contract_promises_acceptance_by_slice(tmp_path, claim):
    slices = "slices: [{name: after_b, match: {labels.first: {in: [b]}}}]"
    named = ", slices: [all, after_b]"

    verdict, cells = checked(tmp_path, claim=claim, slices=slices, more=named, last=4000)

    assert verdict.outcome == "holds"
    for name in ("all", "after_b"):
        cell = cells["drafts", name]
        assert cell.outcome == "holds"
        assert cell.interval[0] < cell.value < cell.interval[1]
        assert cell.units == {"realised": "drafts", "population": "prompt groups"}[claim]
    assert cells["drafts", "all"].n > cells["drafts", "after_b"].n


def test_drafts_that_the_target_alone_accepts_keep_their_law_and_break_the_promise(tmp_path):
    fault = ("draft_acceptance_rule", "law_kept")

    verdict, cells = checked(tmp_path, fault, claim="realised", last=4000)

    assert verdict.outcome == "violated"
    assert cells["drafts", "all"].outcome == "violated"
    assert "drafts accepted without the draft's own probabilities" in cells["drafts", "all"].note
    assert cells["served", "all"].outcome == "holds"


def test_a_kernel_without_drafts_has_nothing_to_promise(tmp_path):
    clauses = CHECKED.format(at_least=0.5, more="")
    path, _ = kit.write(tmp_path, p=TARGET, q=TARGET, bitwise=True, more=clauses)

    verdict = run.check(str(path), run_dir=tmp_path / "run")

    (cell,) = (c for c in verdict.cells if c.clause == "drafts")
    assert (cell.outcome, cell.note) == (
        "not applicable",
        "infer does not speculate here: give it options.speculative_config",
    )


def test_the_place_of_a_draft_is_no_part_of_a_contracts_meaning(tmp_path):
    from servanda.runner import load

    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        kit.table(tmp_path / name, "draft.json", DRAFT)
        drafts = json.dumps(config(model="draft.json"))
        infer = f", options: {{speculative_config: {drafts}}}"
        kit.write(tmp_path / name, p=TARGET, q=TARGET, infer=infer, bitwise=True)

    files = [tmp_path / name / "toy.kernelcontract.yaml" for name in ("one", "two")]
    one, two = (load.beside(load.contract_of(f.read_text(), str(f)), f.parent) for f in files)

    assert one.kernels.infer.options["speculative_config"]["model"].startswith(
        str(tmp_path / "one")
    )
    assert one.digest == two.digest
