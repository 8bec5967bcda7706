# Scoring: what a request says, against the pipeline of a promotion and against a plain sum.

import math

import numpy as np
import pytest

from servanda.contract.identity import EvidenceKey
from servanda.engines import open_engine
from servanda.errors import ContractError, EvidenceError, MeasurementError
from servanda.gateway.controller.intake import Intake
from servanda.gateway.controller.messages import Message
from servanda.gateway.controller.rescoring import (
    ANOTHER,
    COPIED,
    EARLIER,
    ODD,
    Scorer,
    TrainDownError,
)
from servanda.gateway.controller.watched_cells import select_cells
from servanda.judgement.clauses.statistical import Certificate
from servanda.judgement.evidence import Round, weigh
from servanda.judgement.schedule import Unit
from servanda.judgement.traffic import SAMPLING, SEED, traffic_of
from servanda.runner.load import compile, load
from servanda.traces.request_log import request_of
from tests import kit, serving
from tests.gateway.controller import controllers


def scorer(path, open_=controllers.here, **more):
    return Scorer(select_cells(load(path)), open_, clock=controllers.Clock(0.0), **more)


def taken(rows):
    intake = Intake({})
    intake.offer(Message("g", 1.0, rows=rows), now=1e9)
    return intake.take(1000, 10**9, now=1e9)


def test_a_request_says_what_a_plain_sum_over_its_tokens_says(tmp_path):
    path = controllers.contract(tmp_path, q=controllers.FAULTY)
    rows = controllers.rows(path, 30)
    train = open_engine(load(path).kernels.train)
    ids = {name: i for i, name in enumerate(kit.TOKENS)}
    base = dict(zip(range(5), kit.BASE, strict=True))
    for row, one in zip(rows, scorer(path).score(taken(rows)), strict=True):
        first = kit.TOKENS[row["prompt_token_ids"][0]]
        assert set(one.statistics) == {
            (clause, slice_)
            for clause in ("tv", "sampler_fidelity")
            for slice_ in ("all", f"first={first}")
        }
        wanted = math.fsum(
            max(0.0, 1 - base[token] / math.exp(logp))
            for token, logp in zip(row["token_ids"], row["logprobs"], strict=True)
        )
        statistic = one.statistics["tv", "all"]
        assert statistic.total == pytest.approx(wanted, abs=1e-12)
        assert (statistic.n, statistic.known, statistic.missing) == (1, len(row["token_ids"]), 0)
    train.close()
    assert ids["<eos>"] == 4


def test_it_is_the_pipeline_of_a_promotion_request_by_request(tmp_path):
    """The same requests as one closed round of a live leg weigh the same, group by group."""
    path = controllers.contract(tmp_path, q=controllers.FAULTY, round=32)
    rows = controllers.rows(path, 32)
    found = scorer(path).score(taken(rows))
    contract = load(path)
    from servanda.contract.stages import Leg
    from servanda.engines.traffic_replay import TrafficReplayEngine
    from servanda.traces.trace import Batch, align

    requests = [request_of(row) for row in rows]
    traffic = traffic_of(requests, contract, run="toy", leg="gateway")
    plan = compile(contract, leg=Leg("full", share=1.0, if_inconclusive="wait"), traffic=traffic)
    units = tuple(Unit(r.index, i, i) for i, r in enumerate(requests))
    train = open_engine(contract.kernels.train)
    infer = open_engine(contract.kernels.infer)
    batch = Batch(tuple(range(32)), tuple(r.prompt for r in requests), 6)
    drew = TrafficReplayEngine(contract.kernels.infer, infer.describe(), requests).generate(
        batch, contract.workload.sampling.transform, 0
    )
    scored = train.score(
        Batch(batch.sequence_S, batch.prompts, 6, drew.continuations),
        contract.workload.sampling.transform,
        "prefill",
    )
    key = EvidenceKey("", "", "", "", "")
    evidence = weigh(plan, key, [Round("workload", 0, units, align(scored, drew))])
    (weighed,) = evidence.rounds.values()
    for cell, grown in zip(plan.cells, weighed.statistics, strict=True):
        if isinstance(cell.kind, Certificate):
            name = (cell.clause.id, cell.cut.name)
            ours = [one.statistics[name].total for one in found if name in one.statistics]
            assert grown.process.total_G.tolist() == ours


def test_an_answer_without_a_number_is_missing_and_one_that_never_came_has_all_its_room(tmp_path):
    path = controllers.contract(tmp_path)
    whole, unknown, gone, cut = controllers.rows(path, 4)
    answer = {name: cut[name][:2] for name in ("token_ids", "logprobs", "best")}
    cut.update(answer, finish="length")  # and six were asked for
    unknown["logprobs"] = [None] * len(unknown["logprobs"])
    unknown.pop("best")
    found = scorer(path).score(taken([whole, unknown, serving.lost(gone), cut]))
    says = [one.statistics["tv", "all"] for one in found]
    assert says[0].missing == 0
    assert (says[1].known, says[1].missing) == (0, len(unknown["token_ids"]))
    assert (says[2].known, says[2].missing) == (0, 6)
    assert (says[3].known, says[3].missing) == (0, 6)


def test_a_request_for_more_tokens_says_what_one_for_the_workloads_says(tmp_path):
    path = controllers.contract(tmp_path, q=controllers.FAULTY)
    rows = [row for row in controllers.rows(path, 24) if len(row["token_ids"]) == 6]
    longer = []
    for row in rows:
        row.pop("best")
        more = {"token_ids": [0, 1], "logprobs": [-9.0, None]}
        answer = {name: row[name] + values for name, values in more.items()}
        longer.append({**row, **answer, "sampling": {**row["sampling"], "max_new_tokens": 900}})
    short, long = (scorer(path).score(taken(given)) for given in (rows, longer))
    assert len(rows) > 2
    assert [one.statistics for one in long] == [one.statistics for one in short]
    assert all(one.statistics["tv", "all"].known == 6 for one in long)


def test_what_is_no_evidence_is_counted_with_its_reason(tmp_path):
    path = controllers.contract(tmp_path)
    rows = controllers.rows(path, 5)
    rows[1]["sampling"] = {**rows[1]["sampling"], "temperature": 0.5}
    rows[2]["sampling"] = {**rows[2]["sampling"], "seed": 7}
    rows[3]["sampling"] = {**rows[3]["sampling"], "seed": 7}
    rows[4]["x-version"] = 3
    one = scorer(path, since=4)
    found = one.score(taken(rows))
    assert [s.row.outside for s in found] == ["", SAMPLING, "", SEED, EARLIER]
    assert [s.statistics is None for s in found] == [False, True, False, True, True]
    assert one.outside == {SAMPLING: 1, SEED: 1, EARLIER: 1}
    assert [s.seed for s in found] == [None, None, 7, None, None]


def test_a_seed_of_an_earlier_life_is_remembered(tmp_path):
    path = controllers.contract(tmp_path)
    (row,) = controllers.rows(path, 1)
    row["sampling"] = {**row["sampling"], "seed": 7}
    (found,) = scorer(path, seeds=[7]).score(taken([row]))
    assert found.row.outside == SEED


class Engine:
    """A table that fails as it is told to."""

    def __init__(self, kernel, plan):
        self._engine, self._plan, self.closed = open_engine(kernel), plan, False

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def describe(self):
        if self.closed:
            raise MeasurementError("the worker is gone")
        return self._engine.describe()

    def score(self, batch, sampling, path):
        self._plan(self, batch)
        return self._engine.score(batch, sampling, path)

    def close(self):
        self.closed = True


def failing(plan, opened):
    def open_(kernel, side):
        if side == "infer":
            return open_engine(kernel)
        opened.append(Engine(kernel, plan))
        return opened[-1]

    return open_


def test_a_row_that_train_refuses_is_missing_by_itself(tmp_path):
    path = controllers.contract(tmp_path)
    rows = controllers.rows(path, 9)
    bad = tuple(rows[4]["token_ids"])

    def refuse(_, batch):
        if bad in batch.continuations:
            raise MeasurementError("I do not score this")

    opened = []
    one = scorer(path, failing(refuse, opened))
    found = one.score(taken(rows))
    same = [i for i, row in enumerate(rows) if tuple(row["token_ids"]) == bad]
    missing = [i for i, s in enumerate(found) if s.statistics["tv", "all"].missing]
    assert missing == same
    assert (one.missing, one.train.restarts, len(opened)) == (len(same), 0, 1)


def test_an_engine_that_dies_is_begun_again_and_the_row_it_dies_of_is_missing(tmp_path):
    path = controllers.contract(tmp_path)
    rows = controllers.rows(path, 8)
    bad = tuple(rows[2]["token_ids"])

    def die(engine, batch):
        if bad in batch.continuations:
            engine.closed = True
            raise MeasurementError("killed")

    opened = []
    one = scorer(path, failing(die, opened))
    found = one.score(taken(rows))
    assert [s.statistics["tv", "all"].known == 0 for s in found] == [
        tuple(row["token_ids"]) == bad for row in rows
    ]
    assert one.train.restarts == len(opened) - 1 >= 1


def test_an_engine_that_hung_costs_no_request_that_is_scored_later_its_time(tmp_path):
    """Else nothing would be scored for as long as the budget takes to pay for it."""
    path = controllers.contract(tmp_path)
    clock, opened = controllers.Clock(0.0), []

    def hang(engine, _):
        clock.now += 0.5
        if len(opened) == 1:
            clock.now += 1000.0  # until it is killed
            engine.closed = True
            raise MeasurementError("the worker does not answer")

    one = Scorer(select_cells(load(path)), failing(hang, opened), clock=clock)
    one.score(taken(controllers.rows(path, 8)))
    assert (one.train.restarts, one.scored) == (1, 8)
    assert one.seconds == 2 * 0.5  # it was tried again by halves
    assert one.cost_s == 2 * 0.5 / 8


def test_an_end_in_the_middle_of_a_batch_is_no_bug_and_gives_the_rows_back(tmp_path):
    path, opened = controllers.contract(tmp_path), []

    def end(*_):
        one.train.end()
        raise MeasurementError("killed")

    one = scorer(path, failing(end, opened))
    with pytest.raises(TrainDownError, match="killed; the leader ends") as down:
        one.score(taken(controllers.rows(path, 3)))
    assert len(down.value.rows) == 3
    assert (one.train.restarts, len(opened)) == (0, 1)


def test_where_it_cannot_be_begun_again_the_rows_are_given_back(tmp_path):
    path = controllers.contract(tmp_path)
    opened = []

    def die(engine, _):
        engine.closed = True
        raise MeasurementError("killed")

    once = failing(die, opened)

    def open_(kernel, side):
        if side == "train" and opened:
            raise MeasurementError("no memory")
        return once(kernel, side)

    one = scorer(path, open_)
    rows = taken(controllers.rows(path, 3))
    with pytest.raises(TrainDownError, match="killed; no memory") as down:
        one.score(rows)
    assert [row.number for row in down.value.rows] == [0, 1, 2]
    assert all(row.checked for row in down.value.rows)
    assert (one.scored, one.missing, one.train.alive) == (0, 0, False)
    # those that found no room are missing even so
    found = one.score([type(r)(**{**vars(r), "dropped": True}) for r in down.value.rows])
    assert [s.statistics["tv", "all"].known for s in found] == [0, 0, 0]


def test_one_kernel_on_both_sides_is_found_by_what_it_says_of_itself(tmp_path):
    path = controllers.contract(tmp_path)
    (tmp_path / "q.json").write_text((tmp_path / "p.json").read_text())
    with pytest.raises(ContractError, match="the reference scorer must not serve"):
        scorer(path).start()


def test_another_build_of_infer_is_no_evidence(tmp_path):
    path = controllers.contract(tmp_path)

    class Named:
        def __init__(self, engine):
            self._engine = engine

        def __getattr__(self, name):
            return getattr(self._engine, name)

        def describe(self):
            from dataclasses import replace

            told = self._engine.describe()
            said = {**told.fingerprint, "system_fingerprint": "fp_1"}
            return replace(told, fingerprint=said)

    rows = controllers.rows(path, 2)
    rows[0]["fingerprint"], rows[1]["fingerprint"] = "fp_1", "fp_2"
    one = scorer(path, lambda kernel, _: Named(open_engine(kernel)))
    assert [s.row.outside for s in one.score(taken(rows))] == ["", ANOTHER]


def test_an_answer_that_cannot_be_weighed_keeps_no_other_from_it(tmp_path, monkeypatch):
    path = controllers.contract(tmp_path)
    rows = controllers.rows(path, 7)
    one, odd = scorer(path), tuple(rows[3]["prompt_token_ids"] + rows[3]["token_ids"])
    whole = one._statistics

    def statistics(rows):
        if any((*r.request.prompt, *r.request.tokens) == odd for r in rows):
            raise EvidenceError("something odd")
        return whole(rows)

    monkeypatch.setattr(one, "_statistics", statistics)
    found = one.score(taken(rows))
    same = [tuple(r["prompt_token_ids"] + r["token_ids"]) == odd for r in rows]
    says = [s.statistics["tv", "all"] for s in found]
    # it is missing, with all the room it had, and not left out: that would be by its outcome
    assert [(s.known, s.missing) == (0, 6) for s in says] == same
    assert one.outside == {}


def test_a_request_that_cannot_be_weighed_even_without_its_answer_is_counted(tmp_path, monkeypatch):
    one = scorer(path := controllers.contract(tmp_path))

    def statistics(_):
        raise EvidenceError("something odd")

    monkeypatch.setattr(one, "_statistics", statistics)
    assert [s.statistics for s in one.score(taken(controllers.rows(path, 2)))] == [None, None]
    assert one.outside == {ODD: 2}


@pytest.mark.parametrize("key", ["prompt_token_ids", "token_ids"])
def test_ids_beyond_the_vocabulary_never_reach_train(tmp_path, key):
    """On a GPU one such id ends the whole process, row after row."""
    path = controllers.contract(tmp_path)
    rows = controllers.rows(path, 3)
    rows[1][key] = [2**31 - 1] * len(rows[1][key])
    rows[1].pop("best")
    asked = []

    class Watched:
        def __init__(self, engine):
            self._engine = engine

        def __getattr__(self, name):
            return getattr(self._engine, name)

        def score(self, batch, *more):
            asked.append(batch)
            return self._engine.score(batch, *more)

    found = scorer(path, lambda kernel, _: Watched(open_engine(kernel))).score(taken(rows))
    ids = [i for b in asked for part in (*b.prompts, *b.continuations) for i in part]
    assert max(ids) < len(kit.TOKENS)
    says = [one.statistics["tv", "all"] for one in found]
    assert [s.missing for s in says] == [0, len(rows[1]["token_ids"]), 0]


def test_a_row_that_waited_since_before_another_contract_is_no_evidence_of_it(tmp_path):
    path = controllers.contract(tmp_path)
    (row,) = taken([{**controllers.rows(path, 1)[0], "x-version": 3}])
    one = scorer(path, lambda kernel, side: _down() if side == "train" else open_engine(kernel))
    with pytest.raises(TrainDownError):
        one.score([row])
    (checked,) = [one._checked(row)]
    one.since = 4
    assert one._checked(checked).outside == EARLIER


def _down():
    raise MeasurementError("no memory")


def test_self_noise_is_of_the_cells_that_it_was_measured_on(tmp_path):
    path = controllers.contract(tmp_path)
    old = scorer(path)
    for i in range(3):
        old.score(taken(controllers.rows(path, 16, start=16 * i)))
    assert old.noise.floors
    path.write_text(path.read_text().replace("at_most: 0.05", "at_most: 0.06"))
    other = scorer(path)
    other.adopt(old, engine=True)
    assert (other.train.alive, other.noise.floors) == (True, {})


def test_train_is_compared_with_itself_in_another_batch(tmp_path):
    path = controllers.contract(tmp_path)
    one = scorer(path)
    rows = taken(controllers.rows(path, 64))
    for i in range(0, 64, 16):
        one.score(rows[i : i + 16])
    assert set(one.noise.floors) >= {("tv", "all")}
    assert set(one.noise.floors.values()) == {0.0}  # a table says the same in every batch
    assert np.isfinite(one.cost_s)


def test_a_request_whose_prompt_nobody_knows_is_missing_in_the_slices_of_its_launch(tmp_path):
    path = controllers.contract(tmp_path)
    (row,) = controllers.rows(path, 1)
    unknown = {"prompt_token_ids": [0], "x-prompt": "unknown", "x-slices": ["first=b", "all"]}
    one = scorer(path)
    (found,) = one.score(taken([{**row, **unknown, "labels": {}}]))
    assert {name: s.missing for name, s in found.statistics.items()} == {
        ("tv", "first=b"): 6,
        ("tv", "all"): 6,
        ("sampler_fidelity", "first=b"): 6,
        ("sampler_fidelity", "all"): 6,
    }
    assert (one.missing, one.train.alive) == (1, False)  # train was not asked


def test_rows_that_report_trains_logprobs_are_no_evidence(tmp_path):
    """An infer that says what train would say was compared with nothing."""
    path = controllers.contract(tmp_path, q=controllers.FAULTY)
    rows = controllers.rows(path, 40)
    for row in rows:
        row["logprobs"] = [math.log(kit.BASE[token]) for token in row["token_ids"]]
    made = scorer(path)
    assert all(one.statistics is None for one in made.score(taken(rows)))
    assert made.outside == {COPIED: 40}

    text = path.read_text()
    path.write_text(text.replace("bitwise: true\n", "") + "bitwise: true\n")
    declared = scorer(path).score(taken(rows))
    assert all(one.statistics for one in declared)
