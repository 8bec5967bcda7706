# Service levels on table kernels, whose seconds are declared and whose clock is injected.

import json
import math
from dataclasses import asdict, replace
from types import SimpleNamespace

import numpy as np
import pytest

import servanda as sv
from servanda.contract.model import Kernel
from servanda.engines import open_engine
from servanda.engines.table import TableEngine
from servanda.engines.worker import spawn
from servanda.errors import ContractError, MeasurementError
from servanda.judgement.clauses.base import Interim
from servanda.judgement.clauses.service_level import LOOKS
from servanda.runner import run
from servanda.runner.measurement import _open
from servanda.theory.sampling import Sampling
from servanda.traces.trace import Batch, Timing
from tests import kit

LOAD = "load: {{concurrency: 4}}"


def write(folder, clauses, *, infer=None, stable=None, **options):
    """A contract with runtime clauses; seconds of the infer and the stable table."""
    lines = "\n".join(f"    - {{{clause}}}" for clause in clauses)
    more = f"runtime:\n  clauses:\n{lines}"
    path, _ = kit.write(
        folder,
        more=more,
        stable="s.json" if stable is not None else "",
        q={"": [0.4, 0.25, 0.2, 0.15, 0.0]},
        limit=0.3,
        **options,
    )
    kit.table(folder, "s.json", {"": kit.BASE})
    for name, seconds in (("q.json", infer), ("s.json", stable)):
        data = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(data | ({"seconds": seconds} if seconds else {})))
    return path


class Clock:
    """Stands still, or advances at random by about `noise` seconds a reading."""

    def __init__(self, noise=0.0, seed=0):
        self.rng, self.noise, self.now = np.random.default_rng(seed), noise, 0.0

    def __call__(self):
        self.now += self.noise * self.rng.exponential()
        return self.now


def opening(clock, log=None):
    def open_(kernel, side):
        engine = open_engine(kernel)
        engine.clock = clock
        if log is not None:
            plain = engine.time

            def time(batch, sampling, seed, record):
                log.append((side, record, batch.prompts))
                return plain(batch, sampling, seed, record)

            engine.time = time
        return engine

    return open_


def check(path, folder, clock=None, log=None, **options):
    return run.check(path, run_dir=folder / "run", open=opening(clock or Clock(), log), **options)


def cell(verdict, clause):
    return next(c for c in verdict.cells if c.clause == clause)


TTFT = "id: ttft, metric: time_to_first_token_seconds, aggregate: p95, {}, " + LOAD
GAP = "id: gap, metric: inter_token_latency_seconds, aggregate: mean, {}, " + LOAD
SPEED = "id: speed, metric: tokens_per_second, {}, " + LOAD
SECONDS = {"first": 0.5, "next": 0.1, "record": 0.05}


def test_what_is_promised_of_time_is_what_the_clock_says(tmp_path):
    clauses = [
        TTFT.format("at_most: 0.6"),
        GAP.format("at_most: 0.2"),
        SPEED.format("at_least: 20"),
    ]
    verdict = check(write(tmp_path, clauses, infer=SECONDS), tmp_path)
    assert (verdict.outcome, verdict.exit_code) == ("holds", 0)
    ttft, gap, speed = (cell(verdict, name) for name in ("ttft", "gap", "speed"))
    assert ttft.value == pytest.approx(0.5) and ttft.interval == pytest.approx((0.5, 0.5))
    assert gap.value == pytest.approx(0.1)
    # no sequence ends early: 4 requests of 6 tokens in 0.5 + 5 * 0.1 seconds
    assert speed.value == pytest.approx(24.0)
    assert (ttft.n, gap.n, speed.n) == (40, 200, 10)
    assert (ttft.kind, ttft.unit, ttft.units) == ("estimate", "s", "requests")


def test_recording_is_timed_beside_serving_and_the_difference_is_said(tmp_path):
    verdict = check(write(tmp_path, [TTFT.format("at_most: 0.6")], infer=SECONDS), tmp_path)
    assert cell(verdict, "ttft").note == (
        "10 blocks of 4 requests, served without logprobs; recording them changes this by +10.0%"
    )


@pytest.mark.parametrize(
    "clause",
    [TTFT.format("at_most: 0.4"), GAP.format("at_most: 0.09"), SPEED.format("at_least: 25")],
)
def test_too_slow_is_violated_and_fails_the_contract(tmp_path, clause):
    verdict = check(write(tmp_path, [clause], infer=SECONDS), tmp_path)
    assert verdict.exit_code == 1
    assert "estimate" in {c.kind for c in verdict.cells if c.outcome == "violated"}


def test_an_estimate_is_no_part_of_the_price_of_a_violation(tmp_path):
    with_, without = tmp_path / "with", tmp_path / "without"
    timed = check(write(with_, [TTFT.format("at_most: 0.6")], infer=SECONDS), with_)
    plain = check(kit.write(without)[0], without)
    assert timed.price_cells == plain.price_cells


def test_undecided_is_looked_at_three_times_and_says_so(tmp_path):
    log = []
    path = write(tmp_path, [GAP.format("at_most: 0.01")])
    verdict = check(path, tmp_path, Clock(noise=0.01, seed=2), log)
    gap = cell(verdict, "gap")
    assert gap.outcome == "inconclusive" and verdict.exit_code == 3
    assert "40 blocks of 4 requests" in gap.note
    assert "still crosses the limit: time on a quieter machine" in gap.note
    assert gap.interval[0] < 0.01 < gap.interval[1]
    assert len(log) == 2 * (LOOKS[-1] + 1)  # with the warm-up
    assert not gap.open


def test_a_slow_kernel_is_told_from_the_stable_one_and_the_limit_is_in_seconds(tmp_path):
    clause = TTFT.format("at_most: {times: 1.1, of: stable}")
    path = write(tmp_path, [clause], infer={"first": 0.5}, stable={"first": 0.48})
    verdict = check(path, tmp_path)
    ttft = cell(verdict, "ttft")
    assert ttft.outcome == "holds"
    assert ttft.value == pytest.approx(0.5) and ttft.stable == pytest.approx(0.48)
    assert ttft.limit == pytest.approx(1.1 * 0.48)
    slow = write(tmp_path / "slow", [clause], infer={"first": 0.5}, stable={"first": 0.4})
    assert cell(check(slow, tmp_path / "slow"), "ttft").outcome == "violated"


def test_stable_is_only_timed_where_nothing_else_asks_for_it(tmp_path):
    clause = TTFT.format("at_most: {times: 1.1, of: stable}")
    verdict = check(write(tmp_path, [clause], infer=SECONDS, stable=SECONDS), tmp_path)
    assert verdict.stable and "stable" not in verdict.portraits
    assert not list((tmp_path / "run").rglob("*.stable*"))


def test_blocks_alternate_and_the_first_is_thrown_away(tmp_path):
    log = []
    clause = TTFT.format("at_most: {times: 1.1, of: stable}")
    check(write(tmp_path, [clause], infer=SECONDS, stable=SECONDS), tmp_path, log=log)
    order = [{("infer", False): "A", ("infer", True): "C"}.get(entry[:2], "B") for entry in log]
    assert "".join(order) == "ACB" + "ACBBCA" * 5
    prompts = [entry[2] for entry in log[3:]]
    blocks = [prompts[i : i + 3] for i in range(0, len(prompts), 3)]
    assert all(block[0] == block[1] == block[2] for block in blocks)
    assert len({block[0] for block in blocks}) > 5  # at random, in seeded order
    assert all(len(block[0]) == 4 for block in blocks)


def test_a_run_resumes_and_times_only_what_is_missing(tmp_path):
    path = write(tmp_path, [TTFT.format("at_most: 0.6")], infer=SECONDS)
    first = check(path, tmp_path)
    log = []
    assert check(path, tmp_path, log=log) == first and not log
    (folder,) = (tmp_path / "run" / "attempt-1" / "timing").iterdir()
    assert folder.name == "workload-c4-n6"
    (folder / "000004.json").unlink()
    assert check(path, tmp_path, log=log) == first
    assert len(log) == 4  # a warm-up and a block, served and recorded
    (folder / "000004.json").write_text("{")
    with pytest.raises(MeasurementError, match="delete that one file"):
        check(path, tmp_path)


def test_a_verdict_with_timing_replays_from_its_pieces(tmp_path):
    path = write(tmp_path, [GAP.format("at_most: 0.2")], infer=SECONDS)
    plan = sv.compile(sv.load(path))
    pairs = sv.measure(plan, tmp_path / "run", open=opening(Clock()))
    assert sv.judge(plan, sv.weigh(plan, pairs)) == check(path, tmp_path)


def test_an_engine_without_the_verb_makes_the_clause_not_applicable(tmp_path, monkeypatch):
    describe = TableEngine.describe
    monkeypatch.setattr(TableEngine, "describe", lambda self: replace(describe(self), timed=False))
    verdict = check(write(tmp_path, [TTFT.format("at_most: 0.6")]), tmp_path)
    ttft = cell(verdict, "ttft")
    assert (ttft.outcome, ttft.note) == ("not applicable", "the infer engine table cannot be timed")
    assert verdict.outcome == "holds"
    needed = TTFT.format("at_most: 0.6, required: true")
    verdict = check(write(tmp_path / "b", [needed]), tmp_path / "b")
    assert cell(verdict, "ttft").outcome == "inconclusive" and verdict.exit_code == 3


def test_a_load_has_prompts_and_answers_of_its_own_length(tmp_path):
    log = []
    load = "load: {concurrency: 3, new_tokens: 9, prompt_tokens: 5}"
    clause = f"id: ttft, metric: time_to_first_token_seconds, aggregate: mean, at_most: 1, {load}"
    check(write(tmp_path, [clause]), tmp_path, log=log)
    assert {len(p) for _, _, prompts in log for p in prompts} == {5}
    assert {len(prompts) for _, _, prompts in log} == {3}
    assert (tmp_path / "run" / "attempt-1" / "timing" / "workload-c3-n9-p5").is_dir()


def test_requests_beyond_the_batch_size_wait_for_those_before_them(tmp_path):
    path = write(tmp_path, [TTFT.format("at_most: 10")], infer={"first": 1.0})
    text = path.read_text().replace("model: q.json}", "model: q.json, batch_size: 2}")
    path.write_text(text)
    ttft = cell(check(path, tmp_path), "ttft")
    assert ttft.value == pytest.approx(2.0)  # the p95 is of those that waited


def test_a_load_beyond_the_context_is_refused_at_its_place(tmp_path, monkeypatch):
    describe = TableEngine.describe
    monkeypatch.setattr(TableEngine, "describe", lambda self: replace(describe(self), context=40))
    load = "load: {concurrency: 3, new_tokens: 30, prompt_tokens: 20}"
    clause = f"id: ttft, metric: time_to_first_token_seconds, aggregate: mean, at_most: 1, {load}"
    path = write(tmp_path, [clause])
    with pytest.raises(ContractError) as caught:
        check(path, tmp_path)
    assert (
        str(caught.value)
        .splitlines()[0]
        .endswith(
            "clause 'ttft' times requests of 20 prompt tokens and 30 new ones, which exceed the "
            "model's context of 40"
        )
    )
    assert caught.value.problems[0].where.line == 20


def test_times_cross_the_pipe_bit_for_bit(tmp_path):
    kit.table(tmp_path, "q.json", {"": kit.BASE})
    data = json.loads((tmp_path / "q.json").read_text())
    (tmp_path / "q.json").write_text(json.dumps(data | {"seconds": {"first": 100.1, "next": 0.3}}))
    engine = spawn(Kernel(engine="table", model=str(tmp_path / "q.json")), "infer")
    try:
        assert engine.describe().timed
        timing = engine.time(Batch((0, 1), ((0,), (1,)), 5), Sampling(), 3, False)
    finally:
        engine.close()
    assert isinstance(timing, Timing) and len(timing.first_S) == 2
    assert 100.1 <= timing.first_S[0] < 110 and timing.wall >= timing.first_S[0]
    assert (
        Timing(
            **{
                k: tuple(v) if isinstance(v, list) else v
                for k, v in json.loads(json.dumps(asdict(timing))).items()
            }
        )
        == timing
    )


@pytest.mark.parametrize(
    ("clause", "message"),
    [
        ("id: c, metric: time_to_first_tokens, at_most: 5", "time_to_first_token_seconds"),
        (SPEED.format("at_least: 1, aggregate: mean"), "takes no aggregate"),
        (SPEED.format("at_least: 1").replace("4}", "4, tokens: 3}"), "a load has no key 'tokens'"),
    ],
)
def test_what_is_no_service_level_is_told_before_anything_runs(tmp_path, clause, message):
    """tests/contract/test_whole_language.py has the others."""
    with pytest.raises(ContractError, match=message):
        sv.load(write(tmp_path, [clause]))


def test_on_a_step_of_a_promotion_time_is_judged_at_the_part_of_the_step(monkeypatch):
    """Or blocks would end before the verdict is decided."""
    looks = []
    name = "servanda.runner.measurement.Interim"
    monkeypatch.setattr(name, lambda *a, **more: looks.append(Interim(*a, **more)) or looks[-1])
    _open(SimpleNamespace(alpha=0.04, price_cells=3, part=0.25, cells=()), None, None)
    assert looks[0].log_price_violated == pytest.approx(math.log(3 / 0.01))
