# The plan of a leg: its sizes, its price, and which clauses exist on traffic.

import json
import math
import re
from dataclasses import replace

import pytest

from servanda.contract.stages import Leg, course_of
from servanda.judgement.clauses.base import Interim
from servanda.judgement.evidence import Evidence, EvidenceKey
from servanda.judgement.verdict import judge
from servanda.runner.run import compile, load
from tests import kit

OFFLINE, SHADOW = Leg("offline", first=32, last=320), Leg("shadow", first=64, last=640)


KEY = EvidenceKey("c" * 32, "d" * 32, "e" * 32, "f" * 32, "0" * 32)
SLICES = "slices: [{name: first, split: labels.first}]"
MONITORED = "  - {id: seen, metric: tv, aggregate: mean, at_most: 0.3, severity: warning}"
COUNTED = ("tv", "sampler_fidelity")  # what chance can call violated; usable_ratio is counted


def cells(plan):
    return {cell.name: cell for cell in plan.cells}


def test_a_leg_has_its_own_sizes_and_its_part_of_alpha(tmp_path):
    contract = load(kit.write(tmp_path)[0])

    alone, offline, shadow = (
        compile(contract, leg=leg) for leg in (None, replace(OFFLINE, part=0.25), SHADOW)
    )

    assert (alone.schedules[0].first, alone.schedules[0].last) == (32, 2000)
    assert (offline.schedules[0].first, offline.schedules[0].last) == (32, 320)
    assert (shadow.schedules[0].first, shadow.schedules[0].last) == (64, 640)
    assert [p.part for p in (alone, offline, shadow)] == [1.0, 0.25, 1.0]
    assert [p.stage for p in (alone, offline, shadow)] == ["offline", "offline", "shadow"]


def test_all_attempts_legs_windows_and_cells_spend_one_minus_confidence_once(tmp_path, monkeypatch):
    """By the looks that cells are judged with; 1 - confidence = 0.1 has 9/10 for attempt 1."""
    text = "promotion: {offline: {}, shadow: {}, canary: {}, full: {}}"
    path, _ = kit.write(tmp_path, slices=SLICES, limit=0.3, more=MONITORED, confidence=0.9)
    path.write_text(re.sub("promotion: .*", text, path.read_text()))
    contract = load(path)
    looks = []
    monkeypatch.setattr(
        "servanda.judgement.verdict.Interim",
        lambda *given: looks.append(Interim(*given)) or looks[-1],
    )
    course = [*course_of(contract)]
    while len(course) < 60:
        course.append(course[-1].following)
    spent = {}
    for leg in course[:3] + course[3::11]:
        for attempt in (1, 2, 5):
            plan = compile(contract, leg=leg, attempt=attempt)
            looks.clear()
            verdict = judge(plan, Evidence(KEY, plan.digest))
            number = sum(c.enforced and c.metric in COUNTED for c in verdict.cells)
            share = 0.1 * {1: 0.9, 2: 0.05, 5: 0.005}[attempt]
            part = 1 / 4 if leg.stage != "full" else 1 / 4 / (leg.span * (leg.span + 1))
            prices = [look.log_price_violated for look in looks]
            assert len(looks) == len(verdict.cells) and number == verdict.price_cells > 3
            assert prices == pytest.approx([math.log(number / (share * part))] * len(looks))
            assert looks[0].log_price_holds == pytest.approx(-math.log(share))
            assert verdict.alpha_violated == pytest.approx(share * part / number)
            spent[leg.stage, leg.step, leg.span, attempt] = number * math.exp(-max(prices))
    assert 0.07 < sum(spent.values()) <= 0.1


def test_a_digest_covers_the_leg_and_its_part_and_the_noise_of_each_live_leg_is_its_own(tmp_path):
    contract = load(kit.write(tmp_path)[0])
    half, more = replace(OFFLINE, part=0.5), (Leg("full"), Leg("full", span=2))
    legs = [None, OFFLINE, half, SHADOW, Leg("canary"), Leg("canary", 1), *more]

    plans = [compile(contract, leg=leg) for leg in legs]

    assert len({plan.digest for plan in plans}) == len(legs)
    assert len({plan.texts for plan in plans}) == 1
    # offline, a leg draws what a check draws
    assert len({plan.schedules[0].seed for plan in plans}) == len(legs) - 2


def test_offline_a_leg_draws_what_a_check_draws(tmp_path):
    """So a run that `check` began goes on as the first leg of a promotion."""
    contract = load(kit.write(tmp_path)[0])

    ours, theirs = compile(contract, leg=OFFLINE).schedules, compile(contract).schedules

    assert ours[0].seed == theirs[0].seed
    assert ours[0].units(3) == theirs[0].units(3)


WHOLE = """\
golden: {{prompts: golden.jsonl}}
numerical:
  - {{id: drift, metric: kl_nats, at_most: 0.5}}
runtime:
  envelope: {{batch_size: [1, 32]}}
  clauses:
    - {{id: ttft, metric: time_to_first_token_seconds, aggregate: p95, at_most: 1.0,
       load: {{concurrency: 2}}}}
    - {{id: alike, metric: batch_invariance_nats, at_most: 0.5}}
reward: {{range: [0, 1], of: "{rewards}:score"}}
"""


@pytest.fixture
def whole(tmp_path):
    """A contract with a clause of every kind that traffic has nothing for."""
    (tmp_path / "rewards.py").write_text("def score(prompt, answer):\n    return 0\n")
    gap = "  - {id: gap, metric: reward_gap, at_most: 0.9, slices: all}\n"
    path, _ = kit.write(tmp_path, limit=0.3, more=gap, golden=WHOLE.format(rewards="rewards.py"))
    kit.golden(tmp_path)
    return load(path)


def test_what_traffic_has_nothing_for_is_not_applicable_with_the_reason(whole):
    offline, shadow = (cells(compile(whole, leg=leg)) for leg in (OFFLINE, SHADOW))

    reasons = {name: getattr(cell.kind, "reason", "") for name, cell in shadow.items()}

    assert reasons == {
        "drift[all]": "golden texts are measured offline",
        "tv[all]": "",
        "gap[all]": "train does not answer users: rewards are compared offline",
        "ttft[all]": "requests are timed offline, under a load of the contract's own",
        "alike[all]": "batches are put together offline",
        "sampler_fidelity[all]": "",
        "usable_ratio[all]": "",
    }
    assert not any(getattr(cell.kind, "reason", "") for cell in offline.values())
    assert [*offline] != [*shadow]  # nor are there corners of the envelope


def test_a_required_clause_is_no_error_where_it_is_no_matter_of_the_stage(whole):
    drift = whole.numerical[0].model_copy(update={"required": True})
    contract = whole.model_copy(update={"numerical": (drift,)})

    kind = cells(compile(contract, leg=SHADOW))["drift[all]"].kind

    assert not kind.required


def test_traffic_is_the_first_workload(tmp_path):
    path, _ = kit.write(
        tmp_path,
        limit=0.3,
        more="  - {id: other, metric: tv, aggregate: mean, at_most: 0.3, workload: code}",
    )
    text = path.read_text()
    begin, end = text.index("workload:"), text.index("claim:")
    lines = text[begin:end].splitlines()[1:]
    named = "".join(f"  {n}:\n" + "".join(f"  {ln}\n" for ln in lines) for n in ("chat", "code"))
    path.write_text(f"{text[:begin]}workloads:\n{named}{text[end:]}")

    plan = compile(load(path), leg=SHADOW)

    assert [s.name for s in plan.schedules] == ["chat"]
    assert cells(plan)["other[all]"].kind.reason == (
        "traffic is one workload, 'chat', and the clause is of another"
    )
    assert [*cells(plan)] == ["tv[all]", "other[all]", "sampler_fidelity[all]", "usable_ratio[all]"]


def test_slices_and_room_come_from_the_contracts_own_prompts(tmp_path):
    slices = "slices: [{name: first, split: labels.first}]"
    path, _ = kit.write(tmp_path, slices=slices, limit=0.3, samples=2)
    (tmp_path / "prompts.jsonl").write_text(
        "".join(
            json.dumps({"prompt": p, "labels": {"first": p[0]}, "group": "g"}) + "\n"
            for p in ("a", "b", "b c")
        )
    )
    contract = load(path)

    offline, shadow = (compile(contract, leg=leg) for leg in (OFFLINE, SHADOW))

    assert [*cells(shadow)] == [*cells(offline)]
    for name, cell in cells(shadow).items():
        assert cell.capacity == cells(offline)[name].capacity
    assert shadow.schedules[0].rounds == 0
