# Power: faults whose size is known by construction, drawn again under a contract of tables.

import json
import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from benchmarks import faults_page, truth_table
from scripts.make_signatures import to_bytes

from servanda.contract.identity import EvidenceKey
from servanda.engines.faults import FAULTS, signatures
from servanda.judgement.evidence import Evidence, Weighed, weigh_golden
from servanda.judgement.power import Signature, power
from servanda.runner import run
from servanda.traces.trace import Trace, TracePair
from tests import kit
from tests.report import made

SIZES = {"q": {"": kit.BASE}, "first": 64, "last": 640, "limit": 0.1}
LENGTH, SEQUENCES = 6, 50


def pair_at(tv, *, biased=False, lost=False, prompt_tokens=8, length=LENGTH):
    """Tokens that infer gave half the mass, each at TV `tv`; honest draws unless biased."""
    n = SEQUENCES * length
    luck = np.random.Generator(np.random.Philox(5))
    below_N = np.zeros(n) if biased else luck.integers(0, 2, n) / 2

    def side(**columns):
        return Trace(
            sequence_S=np.arange(SEQUENCES),
            length_S=np.full(SEQUENCES, length),
            lost_S=np.full(SEQUENCES, lost),
            prompt_tokens_S=np.full(SEQUENCES, prompt_tokens),
            token_N=np.zeros(n, dtype=np.int64),
            columns={name: np.broadcast_to(column, n) for name, column in columns.items()},
        )

    infer = side(
        logp=np.float64(math.log(0.5)),
        mass_before=below_N,
        entropy_nats=np.float64(math.log(2)),
        p_max=np.float64(0.5),
        rank=np.float64(1.0),
        top1=np.float64(0.0),
    )
    train = side(logp=np.float64(math.log(0.5 * (1 - tv))), top1=np.float64(0.0))
    return TracePair(infer=infer, train=train)


def signature(tv=0.0, golden=(), **more):
    values = {"tv": golden} if golden else {}
    return Signature("fault", "A fault.", pair_at(tv, **more), values)


def healthy(folder, **more):
    """A plan and the evidence of identical kernels."""
    path, _ = kit.write(folder, **(SIZES | more))
    plan = run.compile(run.load(path))
    pairs = run.measure(plan, folder / "run", open=run.in_process)
    return plan, run.weigh(plan, pairs)


def caught(plan, evidence, told):
    (found,) = power(plan, evidence, [told])
    return found.by


@pytest.mark.parametrize(
    ("tv", "by"), [(0.4, ("tv on all",)), (0.08, ()), (0.0, ())], ids=["beyond", "below", "none"]
)
def test_a_fault_beyond_the_limit_is_caught_and_one_below_is_not(tmp_path, tv, by):
    plan, evidence = healthy(tmp_path)

    (found,) = power(plan, evidence, [signature(tv)])

    assert (found.fault, found.summary, found.by) == ("fault", "A fault.", by)
    assert found.grounds == "measured on the bundled 2.6 M-parameter model"


@pytest.mark.slow
def test_a_run_that_is_too_small_does_not_catch_what_a_larger_one_does(tmp_path):
    small, large = (
        healthy(tmp_path / str(n), first=n, last=n, round=8, claim="realised") for n in (16, 640)
    )

    assert caught(*small, signature(0.104)) == ()
    assert caught(*large, signature(0.104)) == ("tv on all",)


@pytest.mark.parametrize(
    ("outcome", "has", "by"),
    [("violated", True, ("tv on all",)), ("violated", 0.5, ()), ("holds", True, ())],
)
def test_a_fault_of_the_kernels_is_caught_where_the_run_itself_is_violated(
    tmp_path, outcome, has, by
):
    plan, evidence = healthy(tmp_path)
    kernels = plan.contract.kernels
    infer = kernels.infer.model_copy(update={"fault": {"fault": has}})
    kernels = kernels.model_copy(update={"infer": infer})
    plan = replace(plan, contract=plan.contract.model_copy(update={"kernels": kernels}))

    weak = replace(signature(0.0), strength="true")
    (found,) = power(plan, evidence, [weak], [made.cell(outcome)])

    assert (found.by, found.grounds == "violated by this run") == (by, bool(by))


def test_the_same_gate_gives_the_same_answer(tmp_path):
    plan, evidence = healthy(tmp_path)
    assert power(plan, evidence, [signature(0.4)]) == power(plan, evidence, [signature(0.4)])


DEPTH = "slices: [{name: depth, split: context.position, at: [3]}]"


def test_the_cells_that_would_be_red_are_named_worst_first(tmp_path):
    plan, evidence = healthy(tmp_path, slices=DEPTH)

    by = caught(plan, evidence, signature(0.7))

    assert by[0] == "tv on all"  # which sees every token
    assert set(by) == {"tv on all", "tv on depth<3", "tv on depth>=3"}


def test_no_more_tokens_count_than_the_workload_draws(tmp_path):
    """A signature is longer than these answers: what breaks beyond them is never met."""
    plan, evidence = healthy(tmp_path, width=4)
    broken = pair_at(0.7)
    logp_N = np.where(
        broken.position_N < 4, broken.infer.columns["logp"], broken.train.columns["logp"]
    )
    late = replace(broken.train, columns={**broken.train.columns, "logp": logp_N})
    only_late = Signature("late", "Late.", replace(broken, train=late), {})

    assert caught(plan, evidence, only_late) == ()
    assert caught(plan, evidence, signature(0.7)) == ("tv on all",)


@pytest.mark.parametrize("claim", ["population", "realised"])
def test_both_claims_have_power(tmp_path, claim):
    plan, evidence = healthy(tmp_path, claim=claim)
    assert caught(plan, evidence, signature(0.5)) == ("tv on all",)
    assert caught(plan, evidence, signature(0.0)) == ()


def test_an_undisclosed_sampler_is_caught_by_what_lay_before_each_token(tmp_path):
    """The logprobs agree; only the mass before each drawn token says that a half is missing."""
    more = "observability: {clauses: [{id: fidelity, metric: sampler_fidelity}]}"
    plan, evidence = healthy(tmp_path, more=more)

    assert caught(plan, evidence, signature(biased=True)) == ("fidelity on all",)
    assert caught(plan, evidence, signature()) == ()


def test_lost_sequences_are_caught_by_the_share_that_is_usable(tmp_path):
    more = "observability: {clauses: [{id: finite, metric: valid_ratio, at_least: 0.9}]}"
    plan, evidence = healthy(tmp_path, more=more)
    assert "finite on all" in caught(plan, evidence, signature(lost=True, length=0))


@pytest.mark.slow
def test_slices_by_label_are_left_out(tmp_path):
    """Labels of the user's corpus are on no token of a signature."""
    slices = "slices: [{name: first, split: labels.first}]"
    more = "  - {id: each, metric: tv, aggregate: mean, at_most: 0.05, slices: [first]}"
    plan, evidence = healthy(tmp_path, slices=slices, more=more)

    by = caught(plan, evidence, signature(0.4))

    assert any(cell.cut.name == "first=a" for cell in plan.cells)
    assert not [name for name in by if "first=" in name]


def test_what_needs_the_kernel_a_second_time_is_left_out(tmp_path):
    more = """\
  - {id: quiet, metric: tv, aggregate: mean, at_most: {times: 3, of: self_noise}}
observability: {clauses: [{id: steady, metric: self_noise, at_most: 0.001}]}"""
    plan, evidence = healthy(tmp_path, more=more)
    assert caught(plan, evidence, signature(0.5)) == ("tv on all",)


def test_a_clause_that_is_not_enforced_catches_nothing(tmp_path):
    more = "  - {id: told, metric: tv, aggregate: mean, at_most: 0.001, severity: warning}"
    plan, evidence = healthy(tmp_path, more=more)
    assert caught(plan, evidence, signature(0.08)) == ()


# golden texts


def with_golden(folder, aggregate="max"):
    clause = f"{{id: drift, metric: tv, aggregate: {aggregate}, at_most: 0.3}}"
    return healthy(folder, golden=f"{kit.golden(folder)}\nnumerical:\n  - {clause}")


def test_golden_texts_catch_by_the_largest_values(tmp_path):
    plan, evidence = with_golden(tmp_path)

    assert caught(plan, evidence, signature(golden=(0.5, 0.1))) == ("drift on all",)
    assert caught(plan, evidence, signature(golden=(0.2, 0.1))) == ()


def test_the_largest_values_say_nothing_of_a_mean(tmp_path):
    plan, evidence = with_golden(tmp_path, "mean")
    assert caught(plan, evidence, signature(golden=(0.5, 0.4))) == ()


def test_where_no_round_was_drawn_only_golden_texts_can_catch(tmp_path):
    plan, _ = with_golden(tmp_path)
    pairs = run.measure(plan, tmp_path / "run", open=run.in_process)
    evidence = Evidence(pairs.key, plan.digest) + weigh_golden(plan, pairs.key, pairs.golden)

    assert caught(plan, evidence, signature(0.7, golden=(0.5,))) == ("drift on all",)
    assert caught(plan, evidence, signature(0.7)) == ()


# identity


def test_a_fault_of_identity_is_refused_only_where_weights_are_verified(tmp_path):
    plan, evidence = healthy(tmp_path)
    permuted = Signature("permuted_ids", "Ids are shifted.", None, {})
    declared = replace(evidence, key=replace(evidence.key, grade="declared"))

    (found,) = power(plan, evidence, [permuted])

    assert evidence.key.grade == "verified"
    assert found.by == ("identity of weights and vocabulary",)
    assert found.grounds == "refused before anything is drawn"
    assert power(plan, declared, [permuted]) == ()


# the shipped signatures


@cache
def shipped():
    return {entry.fault: entry for entry in signatures.catalogue() if not entry.met}


def test_every_fault_of_the_registry_has_a_signature_as_it_is_described():
    assert [*shipped()] == [*FAULTS]
    for name, entry in shipped().items():
        assert entry.summary == FAULTS[name].summary


def test_every_fault_that_the_field_met_at_another_strength_has_a_signature_at_that_one():
    told = {entry.fault: entry.strength for entry in signatures.catalogue() if entry.met}

    assert told == {
        name: json.dumps(fault.field)
        for name, fault in FAULTS.items()
        if fault.field not in (None, fault.default)
    }
    assert all(one.strength == json.dumps(FAULTS[name].default) for name, one in shipped().items())


def test_what_identity_refuses_has_no_tokens_and_the_rest_has():
    refused = {name for name, entry in shipped().items() if entry.pair is None}
    assert refused == {"permuted_ids", "stale_weights"}
    assert all(shipped()[name].golden == {} for name in refused)


def test_the_columns_of_the_shipped_signatures_are_whole():
    for name, entry in shipped().items():
        if entry.pair is None:
            continue
        infer, train = entry.pair.infer, entry.pair.train
        assert len(infer.token_N) > 1000, name
        for column in (*infer.columns.values(), *train.columns.values()):
            assert np.isfinite(column).all(), name
        assert (infer.lost_S.any()) == (name == "lost_sequences")
        assert (infer.length_S[infer.lost_S] == 0).all()
        largest = entry.golden["logit_osc_nats"]
        assert list(largest) == sorted(largest, reverse=True) and np.isfinite(largest).all()


def test_signatures_come_back_from_bytes_as_they_were():
    made = [signature(0.25, golden=(0.5, 0.25)), Signature("none", "Nothing.", None, {})]

    tokens, refused = signatures.from_bytes(to_bytes(made))

    assert refused == made[1]
    assert (tokens.fault, tokens.summary, tokens.golden) == (
        "fault",
        "A fault.",
        {"tv": (0.5, 0.25)},
    )
    for side in ("infer", "train"):
        before, after = getattr(made[0].pair, side), getattr(tokens.pair, side)
        assert np.array_equal(before.length_S, after.length_S)
        assert np.array_equal(before.prompt_tokens_S, after.prompt_tokens_S)
        for name, column in before.columns.items():
            kept = np.float16 if name in ("entropy_nats", "p_max", "rank", "top1") else np.float32
            assert np.array_equal(column.astype(kept), after.columns[name].astype(kept)), name


def quiet(plan, groups):
    """Evidence of kernels without noise: of a healthy run, power takes noise, size and grade."""
    n = len(plan.cells)
    part = Weighed((None,) * n, ((),) * n, groups=groups)
    key = EvidenceKey("contract", "corpus", "train", "infer", "weights", 1, "verified")
    rounds = {(schedule.name, 0): part for schedule in plan.schedules}
    return Evidence(key, plan.digest, rounds, {"golden": part})


def test_tiny_faults_has_the_power_that_its_truth_table_shows():
    """A gate of its limits and size catches every fault, in the cell that the table names first.

    Unless that cell is cut by a label, asks how each kernel is against itself, or which tokens
    were drawn: none of them is in a signature.
    """
    plan = run.compile(run.load(truth_table.CONTRACT))
    evidence = quiet(plan, plan.schedules[0].last)

    caught = power(plan, evidence, signatures.catalogue())
    found = {c.fault: c.by for c in caught if not c.met}

    for name in FAULTS:
        row = faults_page.at_default(truth_table.read(), name)
        first = row.deciding[0] if row.deciding else "identity"
        assert found[name], name
        if first == "identity":
            assert found[name] == ("identity of weights and vocabulary",)
        elif name == "off_by_one_shift":  # refused for which tokens were drawn
            assert first == "fidelity on all" and "tv on all" in found[name]
        elif first != "steady on all" and "domain=" not in first:
            assert first in found[name], name

    # what the check misses at the field's strength, the run does not claim to catch
    for one in (c for c in caught if c.met):
        record = faults_page.at_field(truth_table.read(), one.fault)
        assert record is None or bool(one.by) == record.caught(truth_table.OURS), one
