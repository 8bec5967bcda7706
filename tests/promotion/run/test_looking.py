# One look at a leg: served traffic is weighed and judged as the tokens of a check are.
#
# The kernels are tables, so what they do is known.

import itertools
import json
import math
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from servanda.contract.model import Kernel
from servanda.contract.stages import Leg, course_of
from servanda.errors import ContractError, EvidenceError, MeasurementError
from servanda.promotion.run.promoter import evaluate_leg
from servanda.promotion.run.request_log_files import read_log
from servanda.runner.round_files import read_rounds
from servanda.runner.run import check, compile, in_process, load
from servanda.runner.run_directory import RunDirectory, opened
from tests import kit, serving
from tests.drawn import examples

SHADOW = Leg("shadow", first=64, last=640, part=1 / 7)
AT = 5000.0


def at(path, served, leg=SHADOW, *, root="run", now=AT, open=in_process, attempt=1, run="r1", **kw):
    served = [served] if not isinstance(served, list) else served
    where = path.parent / root
    return evaluate_leg(
        load(path), leg, where, attempt=attempt, run=run, served=served, now=now, open=open, **kw
    )


def cell(found, name, cut="all"):
    verdict = getattr(found, "verdict", found)
    return next(c for c in verdict.cells if (c.clause, c.slice) == (name, cut))


class Opened:
    """Opens kernels in this process, and remembers which."""

    def __init__(self):
        self.sides = []

    def __call__(self, kernel, side):
        self.sides.append(side)
        return in_process(kernel, side)


def test_the_offline_leg_is_a_check_of_its_own_sizes(tmp_path):
    path, _ = kit.write(tmp_path, first=32, last=2000)

    found = at(path, [], Leg("offline", first=32, last=2000))

    verdict = check(path, run_dir=tmp_path / "checked", open=in_process)
    assert found.verdict.cells == verdict.cells
    assert (found.key, found.groups, found.waiting) == (verdict.key, verdict.groups, "")
    assert (tmp_path / "run" / "attempt-1" / "verdict.json").exists()


@pytest.mark.slow
def test_traffic_that_conforms_holds_with_the_key_of_offline(tmp_path):
    path, _ = kit.write(tmp_path)
    offline = at(path, [], Leg("offline", first=32, last=2000))
    served = serving.log(tmp_path, serving.rows(path, "shadow", 640))

    found = at(path, served)

    assert found.verdict.outcome == "holds"
    assert (found.groups, found.waiting, found.outside) == (640, "", {})
    assert found.key == offline.key
    assert found.verdict.stage == "shadow"
    assert (tmp_path / "run" / "shadow" / "attempt-1" / "verdict.json").exists()


def test_a_kernel_that_diverges_is_violated_on_its_traffic(tmp_path):
    path, _ = kit.write(tmp_path, q={"": kit.moved(kit.BASE, 0.2)})
    served = serving.log(tmp_path, serving.rows(path, "shadow", 320))

    assert cell(at(path, served), "tv").outcome == "violated"


def test_a_server_that_lies_about_its_sampling_is_found(tmp_path):
    """It reports one distribution and draws from another, greedier one."""
    path, _ = kit.write(tmp_path)
    kit.table(tmp_path, "greedy.json", {"": [0.6, 0.2, 0.1, 0.05, 0.05]})
    greedy = Kernel(engine="table", model=str(tmp_path / "greedy.json"))  # type: ignore[call-arg]
    drawn = serving.rows(path, "shadow", 320, kernel=greedy)
    honest = {t: math.log(p) for t, p in enumerate(kit.moved(kit.BASE, 0.01))}
    likeliest = sorted(honest.items(), key=lambda pair: -pair[1])[:4]
    for row in drawn:
        row["logprobs"] = [honest[t] for t in row["token_ids"]]
        row["best"] = [[list(pair) for pair in likeliest]] * len(row["token_ids"])

    found = at(path, serving.log(tmp_path, drawn))

    assert cell(found, "sampler_fidelity").outcome == "violated"
    assert found.verdict.exit_code == 1


def as_served(path, root, leg="shadow"):
    """What a check drew, as if it had been served: the same tokens in the same order."""
    plan = compile(load(path))
    rows, index = [], itertools.count()
    for one in read_rounds(plan, RunDirectory(root, 1)):
        trace = one.pair.infer
        starts = (trace.length_S.cumsum() - trace.length_S).tolist()
        for unit, begin, n in zip(one.units, starts, trace.length_S.tolist(), strict=True):
            i = next(index)
            prompt = plan.schedules[0].corpus.prompts[unit.row]
            ids = ["abcd".index(token) for token in prompt.text.split()]
            tokens = trace.token_N[begin : begin + n].tolist()
            rows.append(
                {
                    "index": i,
                    "run": "r1",
                    "leg": leg,
                    "at": 10.0 + i,
                    "served": i + 1,
                    "prompt_token_ids": ids,
                    "token_ids": tokens,
                    "logprobs": trace.columns["logp"][begin : begin + n].tolist(),
                    "group": str(unit.group),
                    "labels": prompt.labels,
                    "sampling": {"max_new_tokens": plan.schedules[0].width},
                    "finish": "stop" if tokens[-1] == 4 else "length",
                }
            )
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("claim", ["population", "realised"])
@pytest.mark.parametrize("tv", [0.01, 0.2])
def test_the_same_tokens_say_the_same_whether_drawn_or_served(tmp_path, claim, tv):
    slices = "slices: [{name: first, split: labels.first}]"
    q = {"": kit.moved(kit.BASE, tv)}
    path, _ = kit.write(tmp_path, q=q, claim=claim, slices=slices, samples=2, limit=0.1, last=512)
    drawn = check(path, run_dir=tmp_path / "checked", open=in_process)
    rows = as_served(path, tmp_path / "checked")

    found = at(path, serving.log(tmp_path, rows), replace(SHADOW, part=1.0, first=32, last=512))

    assert found.groups == drawn.groups
    shown = ("outcome", "value", "interval", "n", "missing", "e_holds", "e_violated", "limit")
    for name in (c.slice for c in drawn.cells if c.clause == "tv"):
        ours, theirs = cell(found, "tv", name), cell(drawn, "tv", name)
        for what in shown:
            assert getattr(ours, what) == pytest.approx(getattr(theirs, what)), (name, what)
    assert cell(found, "usable_ratio") == cell(drawn, "usable_ratio")


def test_no_closed_round_never_holds_and_loads_infer_alone(tmp_path):
    path, _ = kit.write(tmp_path)
    offline = at(path, [], Leg("offline", first=32, last=2000))
    served = serving.log(tmp_path, serving.rows(path, "shadow", 31))
    opened = Opened()

    found = at(path, served, open=opened)

    assert opened.sides == ["infer"]
    assert found.verdict.outcome == "inconclusive"
    assert (found.groups, found.key) == (0, offline.key)
    assert {c.n for c in found.verdict.cells} == {0}
    assert found.waiting == (
        "no pass before 64 prompt groups, 0 complete; 31 of the 32 of the next round have arrived"
    )


def test_a_log_that_is_not_there_yet_is_waited_for(tmp_path):
    path, _ = kit.write(tmp_path)

    found = at(path, tmp_path / "served.jsonl")

    assert found.verdict.outcome == "inconclusive"
    assert found.waiting == "the log has no request for run 'r1' on shadow yet"


def test_without_any_evidence_train_is_asked_who_it_is(tmp_path):
    path, _ = kit.write(tmp_path)
    opened = Opened()

    found = at(path, tmp_path / "served.jsonl", open=opened)

    assert opened.sides == ["infer", "train"]
    assert found.key == at(path, [], Leg("offline", first=32, last=2000)).key


def test_another_build_is_found_by_its_key_and_nothing_of_it_is_weighed(tmp_path):
    path, _ = kit.write(tmp_path)
    before = at(path, serving.log(tmp_path, serving.rows(path, "shadow", 64)))
    kit.table(tmp_path, "q.json", {"": kit.moved(kit.BASE, 0.02)})

    after = at(path, tmp_path / "served.jsonl")

    assert before.key.differences(after.key) == ["the infer kernel"]
    assert (after.groups, after.verdict.outcome) == (0, "inconclusive")


def test_another_build_is_found_before_any_round_has_closed(tmp_path):
    path, _ = kit.write(tmp_path)
    before = at(path, [], Leg("offline", first=32, last=2000))
    kit.table(tmp_path, "q.json", {"": kit.moved(kit.BASE, 0.02)})

    after = at(path, tmp_path / "served.jsonl")

    assert before.key.differences(after.key) == ["the infer kernel"]


def test_other_train_weights_are_found_offline_too(tmp_path):
    path, _ = kit.write(tmp_path)
    leg = Leg("offline", first=32, last=2000)
    before = at(path, [], leg)
    for name in ("p.json", "q.json"):
        kit.table(tmp_path, name, {"": kit.BASE}, weights="trained on")

    after = at(path, [], leg)

    assert "the weights" in before.key.differences(after.key)
    assert (after.groups, after.verdict.outcome) == (0, "inconclusive")


def test_a_new_look_scores_new_rounds_only(tmp_path):
    path, _ = kit.write(tmp_path)
    scored = []

    def counting(kernel, side):
        engine = in_process(kernel, side)
        score = engine.score
        engine.score = lambda batch, *rest: scored.append(len(batch)) or score(batch, *rest)
        return engine

    served = serving.log(tmp_path, serving.rows(path, "shadow", 70))
    first = at(path, served, open=counting)
    after_first = sum(scored)
    again = at(path, served, open=counting)
    serving.log(tmp_path, serving.rows(path, "shadow", 30, start=70))
    third = at(path, served, open=counting)

    assert (first.groups, again.groups, third.groups) == (64, 64, 96)
    assert first.verdict.cells == again.verdict.cells
    assert after_first == 64 + 2 * 4  # and a tenth of each round again
    assert sum(scored) == 96 + 3 * 4


FAST = settings(
    max_examples=examples(6), suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.mark.slow
@FAST
@given(st.lists(st.integers(1, 30), max_size=4))
def test_looks_at_any_split_of_the_log_end_in_one_verdict(tmp_path_factory, sizes):
    folder = tmp_path_factory.mktemp("split")
    path, _ = kit.write(folder)
    rows = serving.rows(path, "shadow", 140)
    at_once = at(path, serving.log(folder, rows, "whole.jsonl"), root="whole")

    for part in [*itertools.accumulate(sizes), len(rows)]:
        (folder / "part.jsonl").write_text("")
        parted = at(path, serving.log(folder, rows[:part], "part.jsonl"), root="parted")

    assert parted.verdict.cells == at_once.verdict.cells
    assert parted.verdict.evidence == at_once.verdict.evidence
    assert parted.groups == at_once.groups == 128


def test_two_legs_in_one_log_are_two_bodies_of_evidence(tmp_path):
    path, _ = kit.write(tmp_path)
    shadow, canary = (serving.rows(path, leg, 64, seed=i) for i, leg in enumerate(LEGS))
    mixed = [row for pair in zip(shadow, canary, strict=True) for row in pair]
    both = serving.log(tmp_path, mixed)
    alone = serving.log(tmp_path, shadow, "alone.jsonl")

    found, other = at(path, both), at(path, both, replace(SHADOW, stage="canary"))

    assert found.verdict.cells == at(path, alone, root="alone").verdict.cells
    assert other.verdict.evidence != found.verdict.evidence
    assert (tmp_path / "run" / "canary-1").is_dir()


LEGS = ("shadow", "canary-1")


def test_rows_of_another_run_are_not_evidence(tmp_path):
    path, _ = kit.write(tmp_path)
    served = serving.log(tmp_path, serving.rows(path, "shadow", 64, run="r0"))

    assert at(path, served).groups == 0


@pytest.mark.parametrize("broken", ["gap", "repeat", "order"])
def test_a_log_that_lost_its_order_is_refused(tmp_path, broken):
    path, _ = kit.write(tmp_path)
    rows = serving.rows(path, "shadow", 64)
    rows = {
        "gap": [*rows[:9], *rows[10:]],
        "repeat": [*rows[:9], rows[8], *rows[9:]],
        "order": [*rows[:9], rows[10], rows[9], *rows[11:]],
    }[broken]

    with pytest.raises(EvidenceError):
        at(path, serving.log(tmp_path, rows))


def test_a_rotated_log_is_read_in_the_order_of_its_names(tmp_path):
    path, _ = kit.write(tmp_path)
    rows = serving.rows(path, "shadow", 96)
    folder = tmp_path / "logs"
    folder.mkdir()
    for n, begin in enumerate(range(0, 96, 40)):
        serving.log(folder, rows[begin : begin + 40], f"served-{n:03d}.jsonl")
    (folder / "notes.txt").write_text("not a log")

    parts = sorted(folder.glob("*.jsonl"), reverse=True)

    assert [r.index for r in read_log([folder])] == [*range(96)]
    assert read_log(parts) == read_log([folder])
    assert at(path, folder).groups == 96


def test_a_file_of_the_log_that_is_gone_is_missed(tmp_path):
    path, _ = kit.write(tmp_path)
    rows = serving.rows(path, "shadow", 96)
    first = serving.log(tmp_path, rows[:64], "served-0.jsonl")
    second = serving.log(tmp_path, rows[64:], "served-1.jsonl")
    at(path, [first, second])

    with pytest.raises(
        EvidenceError, match="round 2 of shadow has been evaluated, and its requests"
    ):
        at(path, first)
    with pytest.raises(EvidenceError, match="request 0 to 63 of shadow is not in the log"):
        at(path, second)


@pytest.mark.parametrize(
    "change",
    [
        {"logprobs": [-0.25]},
        {"labels": {"first": "b"}},
        {"group": "of another prompt"},
        {"at": 2e3},
        {"served": 409},
        {"prompt_token_ids": [1]},
        {"key": "9f2c41d0"},
        {"sampling": {"temperature": 1.0, "max_new_tokens": 6, "seed": 5}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_nothing_is_said_of_a_request_after_its_answer_was_weighed(tmp_path, change):
    """A label that is given to a bad answer afterwards would choose its slice."""
    path, _ = kit.write(tmp_path, prompts=("a",))
    rows = serving.rows(path, "shadow", 64, best=0)
    served = serving.log(tmp_path, rows)
    at(path, served)
    rows[40] |= change
    if "logprobs" in change:
        rows[40]["logprobs"] = change["logprobs"] * len(rows[40]["token_ids"])
    served.write_text("")
    serving.log(tmp_path, rows)

    with pytest.raises(
        EvidenceError, match="round 1 of shadow has been evaluated, and the log has changed"
    ):
        at(path, served)


def test_bytes_that_are_no_text_are_refused_with_their_line(tmp_path):
    path, _ = kit.write(tmp_path)
    served = serving.log(tmp_path, serving.rows(path, "shadow", 2))
    served.write_bytes(served.read_bytes() + b'{"run": "\xff"}\n')

    with pytest.raises(EvidenceError, match=r"served\.jsonl:3:1: not UTF-8 text"):
        at(path, served)


def test_half_a_line_and_half_a_character_are_left_for_the_next_look(tmp_path):
    path, _ = kit.write(tmp_path)
    served = serving.log(tmp_path, serving.rows(path, "shadow", 64))
    whole = at(path, served, root="whole")
    served.write_bytes(served.read_bytes() + '{"run": "ü'.encode()[:-1])

    assert at(path, served).verdict.cells == whole.verdict.cells


def test_lost_requests_count_against_both_answers(tmp_path):
    path, _ = kit.write(tmp_path)
    rows = serving.rows(path, "shadow", 640)
    rows = [serving.lost(row) if i % 10 == 3 else row for i, row in enumerate(rows)]

    found = at(path, serving.log(tmp_path, rows))

    assert found.verdict.lost == 64
    assert cell(found, "usable_ratio").outcome == "error"
    assert found.verdict.outcome == "error"


def test_requests_that_are_not_the_workloads_are_outside_and_counted(tmp_path):
    path, _ = kit.write(tmp_path)
    rows = serving.rows(path, "shadow", 80)
    for row in rows[::5]:
        row["sampling"] = {**row["sampling"], "temperature": 0.5}

    found = at(path, serving.log(tmp_path, rows))

    assert found.groups == 64
    assert found.outside == {"asked for another sampling than the workload's": 16}
    assert found.verdict.sequences == 64


def test_an_end_that_the_log_leaves_out_counts_as_missing(tmp_path):
    path, _ = kit.write(tmp_path)
    rows = serving.rows(path, "shadow", 64, best=0)
    ended = [row for row in rows if row["finish"] == "stop" and len(row["token_ids"]) > 1]
    for row in ended:
        row["token_ids"], row["logprobs"] = row["token_ids"][:-1], row["logprobs"][:-1]

    found = at(path, serving.log(tmp_path, rows))

    assert cell(found, "usable_ratio").missing == len(ended)


@pytest.mark.slow
def test_a_violation_is_charged_the_part_of_its_leg(tmp_path):
    """The same evidence, at a price 7 times as high where the leg has a seventh of alpha."""
    path, _ = kit.write(tmp_path, q={"": kit.moved(kit.BASE, 0.1)}, round=2)
    rows, outcomes = serving.rows(path, "shadow", 28), set()
    for n in range(0, len(rows), 4):
        served = serving.log(tmp_path, rows[n : n + 4])
        own, shared = (
            at(path, served, replace(SHADOW, part=part), root=f"run-{part}")
            for part in (1.0, 1 / 7)
        )
        e = cell(own, "tv").e_violated
        assert e == cell(shared, "tv").e_violated
        price = math.log(own.verdict.price_cells / own.verdict.alpha)
        for found, dearer in ((own, 0.0), (shared, math.log(7))):
            assert (cell(found, "tv").outcome == "violated") == (e >= price + dearer)
        outcomes.add((cell(own, "tv").outcome, cell(shared, "tv").outcome))
        assert own.plan.digest != shared.plan.digest
    assert outcomes == {
        ("inconclusive", "inconclusive"),
        ("violated", "inconclusive"),
        ("violated", "violated"),
    }


@pytest.mark.slow
def test_one_kernel_on_both_sides_is_never_red(tmp_path):
    for seed in range(30):
        path, _ = kit.write(tmp_path / str(seed), q={"": kit.BASE}, seed=seed)
        rows = serving.rows(path, "shadow", 64, seed=seed)
        found = at(path, serving.log(path.parent, rows), replace(SHADOW, part=1.0))

        assert found.groups == 64
        assert not [c for c in found.verdict.cells if c.outcome in ("violated", "error")], seed


def test_a_leg_that_waits_has_no_last_round(tmp_path):
    path, _ = kit.write(tmp_path, limit=0.3)
    served = serving.log(tmp_path, serving.rows(path, "shadow", 160))
    leg = replace(SHADOW, first=32, last=96)

    ends, waits = at(path, served, leg), replace(leg, if_inconclusive="wait")

    assert (ends.groups, ends.waiting) == (96, "")
    assert at(path, served, waits, root="waits").groups == 160


def test_what_ended_a_look_is_told_apart(tmp_path):
    path, _ = kit.write(tmp_path, q={"": kit.moved(kit.BASE, 0.05)})
    served = serving.log(tmp_path, serving.rows(path, "shadow", 128))
    open_still, text = replace(SHADOW, last=640), path.read_text()

    waits = at(path, served, open_still, text=text)
    ends = at(path, served, replace(SHADOW, last=128), root="ends")

    assert [f.verdict.circumstances.stopped for f in (waits, ends)] == ["traffic", "size"]
    kept = json.loads((tmp_path / "run" / "shadow" / "attempt-1" / "verdict.json").read_text())
    assert kept["circumstances"]["contract_text"] == text


def test_a_leg_that_waits_may_be_too_short_for_its_limits(tmp_path):
    """It goes on until there is enough; one that ends could never hold."""
    path, _ = kit.write(tmp_path)
    served = serving.log(tmp_path, serving.rows(path, "shadow", 320))
    leg = replace(SHADOW, first=32, last=64)

    with pytest.raises(ContractError, match=r"second number of promotion\.shadow\.prompt_groups"):
        at(path, served, leg)
    assert at(path, served, replace(leg, if_inconclusive="wait")).verdict.outcome == "holds"


def test_when_the_time_is_over_no_round_starts(tmp_path):
    path, _ = kit.write(tmp_path)
    served = serving.log(tmp_path, serving.rows(path, "shadow", 160))
    asked = itertools.count()

    found = at(path, served, deadline=lambda: next(asked) >= 2)

    assert found.groups == 64
    assert cell(found, "tv").note.startswith("the time was over")
    assert at(path, served).groups == 160


def test_every_leg_of_a_course_can_be_looked_at(tmp_path):
    path, _ = kit.write(tmp_path, limit=0.3)
    text = path.read_text()
    stages = ", ".join(
        f"{stage}: {{prompt_groups: [32, 64]}}" for stage in ("shadow", "canary", "full")
    )
    path.write_text(text.replace("canary: {}", stages))

    for leg in course_of(load(path)):
        served = serving.log(tmp_path, serving.rows(path, leg.name, 64), f"{leg.name}.jsonl")
        found = at(path, served, leg)
        assert (found.verdict.stage, found.verdict.outcome) == (leg.stage, "holds")


def test_two_looks_at_once_are_refused(tmp_path):
    path, _ = kit.write(tmp_path)
    served = serving.log(tmp_path, serving.rows(path, "shadow", 64))

    with opened(tmp_path / "run" / "shadow"), pytest.raises(MeasurementError, match="another"):
        at(path, served)


def with_stable(folder, stages):
    """A contract that compares with a stable kernel at some stages."""
    more = "  - {id: beside, metric: tv, aggregate: mean, slices: all, "
    more += f"at_most: {{times: 3, of: stable}}, stages: {stages}}}"
    path, _ = kit.write(folder, more=more, stable="s.json", limit=0.3)
    kit.table(folder, "s.json", {"": kit.moved(kit.BASE, 0.02)})
    contract = load(path)
    assert contract.stable is not None
    return path


@pytest.mark.sampled(3)
@pytest.mark.parametrize("stages", ["[offline]", "[canary]", "[offline, canary]"])
def test_a_stage_that_compares_with_stable_does_not_change_whom_a_promotion_is_of(tmp_path, stages):
    path = with_stable(tmp_path, stages)
    offline = at(path, [], Leg("offline", first=32, last=320))
    served = serving.log(tmp_path, serving.rows(path, "canary-1", 64))

    canary = at(path, served, replace(SHADOW, stage="canary"))

    assert canary.groups == 64
    assert canary.key == offline.key
    applicable = cell(canary, "beside").outcome != "not applicable"
    assert applicable == ("canary" in stages)


def test_a_stable_kernel_that_changes_while_a_leg_looks_at_it_is_told(tmp_path):
    path = with_stable(tmp_path, "[canary]")
    leg = replace(SHADOW, stage="canary")
    before = at(path, [], Leg("offline", first=32, last=320))
    served = serving.log(tmp_path, serving.rows(path, "canary-1", 64))
    at(path, served, leg)
    kit.table(tmp_path, "s.json", {"": kit.moved(kit.BASE, 0.03)})

    after = at(path, served, leg)

    assert before.key.differences(after.key) == ["the stable kernel"]
    assert after.groups == 0


def test_a_leg_is_measured_in_processes_of_its_own(tmp_path):
    path, _ = kit.write(tmp_path)
    served = serving.log(tmp_path, serving.rows(path, "shadow", 64))

    spawned = evaluate_leg(
        load(path), SHADOW, tmp_path / "spawned", attempt=1, run="r1", served=[served], now=AT
    )

    assert spawned.verdict.cells == at(path, served).verdict.cells


def test_prompts_of_many_lengths_are_the_same_requests_at_every_look(tmp_path):
    """A batch runs with prompts of like length side by side, and a log has them as they came."""
    path, _ = kit.write(tmp_path, prompts=("a", "b c a d b", "c d", "d a b c", "a b c"))
    rows = serving.rows(path, "shadow", 96)
    served = serving.log(tmp_path, rows[:64])
    first = at(path, served)

    again = at(path, serving.log(tmp_path, rows[64:]))

    assert (first.groups, again.groups) == (64, 96)
