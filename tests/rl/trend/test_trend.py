"""The trend: a run is compared with good runs, in the monitor, on its state, and on a dump."""

import json

import numpy as np
import pytest
from click.testing import CliRunner

from servanda.cli.main import main
from servanda.contract.clause import Trend
from servanda.errors import ContractError, EvidenceError
from servanda.rl import Monitor
from servanda.rl.recorded_run import recorded_run
from servanda.rl.steps.contract import contract_of
from servanda.rl.trend.changes import (
    GoodRun,
    Reference,
    RunChart,
    StepScalars,
    ratios_of_bins,
    read_reference,
    with_reference,
)
from servanda.runner.load import load
from servanda.theory.bounds.assumptions import ASSUMPTIONS
from servanda.theory.stats.histogram import BINS
from servanda.theory.stats.tally import tally
from tests.field.worlds import NOISE, draw, run

STEPS = 8
SIZE = {"size": 12, "width": 48}
RULES = """
trend: {{reference: {reference}}}
escalation:
  - {{when: {{clause: trend, is: violated}}, do: [halt, {{page: oncall}}]}}
"""


def servanda(*words):
    done = CliRunner().invoke(main, [*map(str, words)], prog_name="servanda")
    return done.exit_code, done.output


def steps(seed, rises=0.0):
    """Steps of a run whose noise rises by a share per step, from step 2 on."""
    for t in range(STEPS):
        yield draw(seed, t, noise=NOISE * (1 + rises * max(t - 1, 0)), **SIZE)


def observed(monitor, drawn):
    return [monitor.observe(d.train, d.infer, d.mask, weights=d.step) for d in drawn]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Three good runs, and their reference."""
    folder = tmp_path_factory.mktemp("good")
    for seed in range(3):
        observed(Monitor("trl", state=folder / f"good-{seed}.jsonl"), steps(seed))
    files = sorted(folder.glob("good-*.jsonl"))
    code, text = servanda(
        "contract", "calibrate", *files, "--save-reference", folder / "good.reference.json"
    )
    assert code == 0, text
    assert "at most 1/4" in text and "first step of each is left out" in text
    return folder


@pytest.fixture(scope="module")
def reference(folder):
    return folder / "good.reference.json"


def scalars(train, infer):
    (count_K,) = tally(train, infer, np.ones(len(train), dtype=bool))
    return StepScalars.of(count_K[:BINS], int(count_K[BINS]))


def test_scalars_are_those_of_the_tokens():
    """Against float64 on every token; bins have 2^-9 of a log ratio, and magnitudes 1/16 octave."""
    rng = np.random.default_rng(0)
    infer = -rng.exponential(1.0, 5000)
    train = infer + rng.standard_t(3, 5000) * 0.02
    train[:7] = np.nan
    found = scalars(train, infer).values
    d = (train - infer)[7:]
    assert found["coverage"] == 4993 / 5000
    assert found["k3_nats"] == pytest.approx(np.mean(np.expm1(d) - d), rel=0.005)
    assert found["abs_log_ratio_nats"] == pytest.approx(np.abs(d).mean(), rel=0.002)
    exact = np.sort(np.abs(d))[int(np.ceil(0.99 * len(d))) - 1]
    assert exact <= found["abs_log_ratio_p99_nats"] <= exact * (1 + 1 / 16)


def test_scalars_of_parts_add_up_to_those_of_the_whole():
    rng = np.random.default_rng(1)
    infer = -rng.exponential(1.0, 900)
    train = infer + rng.normal(0, 0.1, 900)
    train[0] = -np.inf  # a token without mass under train
    whole = scalars(train, infer)
    parts = scalars(train[:400], infer[:400]) + scalars(train[400:], infer[400:])
    assert parts.magnitudes == whole.magnitudes and parts.usable == whole.usable
    assert whole.values["k3_nats"] == np.inf
    assert scalars(infer, infer).values["abs_log_ratio_p99_nats"] == 0
    assert StepScalars().values == {}


def test_ratios_near_the_largest_number_are_summed_without_a_warning():
    count_K = np.zeros(BINS)
    count_K[int(np.argmax(ratios_of_bins()[0]))] = 3
    assert np.isinf(StepScalars.of(count_K, 0).drift)


@pytest.mark.slow
def test_a_monitor_is_red_once_the_gap_has_changed_within_its_limits(reference):
    found = observed(Monitor("trl", reference=reference), steps(7, rises=0.1))
    first = next(step for step in found if step.outcome == "violated")
    gradient = next(c for c in first.verdict.cells if c.clause == "gradient")
    assert gradient.outcome == "holds"  # the limit sees nothing
    assert first.exit_code == 1 and first.metrics["servanda/change"] > 1
    assert "the gap has changed" in first.cause
    assert first.worst.metric in ("k3_nats", "abs_log_ratio_p99_nats")
    assert found[0].metrics.get("servanda/change") is None  # the first step is no reference


def test_a_healthy_run_holds(reference):
    found = observed(Monitor("trl", reference=reference), steps(8))
    assert {step.outcome for step in found} == {"holds"}


def test_without_a_reference_nothing_changes(reference):
    plain, compared = (observed(Monitor("trl", reference=of), steps(8)) for of in (None, reference))
    for own, other in zip(plain, compared, strict=True):
        cells = tuple(c for c in other.verdict.cells if c.section != "trend")
        assert own.verdict.cells == cells
    assert plain[-1].verdict.key.contract != compared[-1].verdict.key.contract


def test_a_restarted_monitor_continues(reference, tmp_path):
    whole = observed(Monitor("trl", reference=reference), steps(7, rises=0.1))
    drawn, state = [*steps(7, rises=0.1)], tmp_path / "run.jsonl"
    for part in (drawn[:3], drawn[3:]):
        found = observed(Monitor("trl", reference=reference, state=state), part)
    assert found[-1].metrics["servanda/change"] == whole[-1].metrics["servanda/change"]
    assert [s.outcome for s in found] == [s.outcome for s in whole[3:]]


def test_a_watch_compares_a_state_that_was_recorded_without_a_reference(reference, tmp_path):
    state = tmp_path / "run.jsonl"
    observed(Monitor("trl", state=state), steps(7, rises=0.1))
    assert servanda("watch", state, "--once")[0] == 0
    code, text = servanda("watch", state, "--once", "--reference", reference)
    assert code == 1
    assert "cause: the gap has changed: k3_nats is x" in text
    assert "called changed within 7 steps with probability at most 1/4" in text
    observed(Monitor("trl", state=tmp_path / "good.jsonl"), steps(8))
    assert servanda("watch", tmp_path / "good.jsonl", "--once", "--reference", reference)[0] == 0


def test_a_dump_gets_the_answer_of_the_monitor(reference, tmp_path):
    """`check` and `watch` of a dump, and a monitor on the same tokens, change at one step."""
    drawn = {d.step: d for d in steps(7, rises=0.1)}
    run(tmp_path / "dump", drawn.__getitem__, range(STEPS))
    found = observed(Monitor("trl", reference=reference), drawn.values())
    since = next(step.weights for step in found if step.outcome == "violated")
    code, text = servanda(
        "check", tmp_path / "dump", "--preset", "trl", "--reference", reference, "--quiet"
    )
    assert code == 1 and f"VIOLATED: the gap has changed since step {since} " in text
    assert "next     servanda preflight" in text
    assert servanda("check", tmp_path / "dump", "--preset", "trl", "--quiet")[0] == 0
    code, text = servanda(
        "watch", tmp_path / "dump", "--once", "--preset", "trl", "--reference", reference
    )
    assert code == 1 and f"✗ step {since}: violated" in text


def test_a_dump_is_a_reference_as_the_state_of_its_monitor_is(folder, tmp_path):
    run(tmp_path / "dump", lambda step: draw(0, step, **SIZE), range(STEPS))
    of_dump, of_state = recorded_run(tmp_path / "dump"), recorded_run(folder / "good-0.jsonl")
    for (step, own), (other_step, other) in zip(of_dump.steps, of_state.steps, strict=True):
        assert step == other_step
        for name, value in own.items():
            assert value == pytest.approx(other[name], rel=0.003)


def test_a_contract_names_its_reference_and_its_actions(reference, tmp_path):
    text, _ = contract_of("trl", "mine", ())
    path = reference.with_name("mine.kernelcontract.yaml")
    path.write_text(text + RULES.format(reference=reference.name))
    monitor = Monitor(path, stop=True)
    found = observed(monitor, steps(7, rises=0.1))
    first = next(step for step in found if step.outcome == "violated")
    assert first.action == ("halt", "page") and first.pages == ("oncall",)
    # the digest counts what the reference says, and not where it lies
    contract = load(path)
    moved = contract.model_copy(
        update={"trend": contract.trend.model_copy(update={"reference": "elsewhere.json"})}
    )
    assert moved.digest == contract.digest
    assert with_reference(contract, None).digest != contract.digest
    assert monitor.contract.trend.digest == read_reference(reference).digest


@pytest.mark.parametrize(
    ("trend", "says"),
    [
        ("trend: {}", "hint: servanda contract calibrate good-run.jsonl --save-reference"),
        ("trend: {metrics: [k3_nats]}", "trend names no reference of good runs"),
        (
            "trend: {reference: x.json}\nescalation:\n"
            "  - {when: {clause: trend, is: violated}, do: [mask]}",
            "trend is about all tokens of a step",
        ),
    ],
)
def test_a_trend_that_cannot_be_judged_is_refused(trend, says, tmp_path):
    path = tmp_path / "mine.kernelcontract.yaml"
    path.write_text(f"{contract_of('trl', 'mine', ())[0]}\n{trend}\n")
    with pytest.raises(ContractError) as refused:
        load(path)
    assert says in str(refused.value)


def test_what_was_not_measured_is_missing_and_no_agreement(reference):
    chart = RunChart(read_reference(reference), Trend(metrics=("k3_nats",)))
    chart.add(0, {"k3_nats": 1e-4})
    (cell,) = chart.add(1, {"coverage": 1.0})
    assert (cell.outcome, cell.n, cell.missing) == ("inconclusive", 0, 1)
    assert "k3_nats was not measured" in cell.note
    (cell,) = chart.add(2, {"k3_nats": 1e-4})
    assert (cell.outcome, cell.n, cell.missing) == ("holds", 1, 1)
    for step in (3, 4):
        (cell,) = chart.add(step, {"k3_nats": 9.0})
    assert cell.outcome == "violated" and chart.since in (3, 4)
    (cell,) = chart.add(5, {})  # a change is not undone by silence
    assert (cell.outcome, cell.missing) == ("violated", 2)


def test_a_run_that_goes_back_forgets_the_later_steps(reference):
    chart = RunChart(read_reference(reference))
    rows = [{"k3_nats": x, "abs_log_ratio_p99_nats": 0.05, "coverage": 1.0} for x in (1e-4, 9.0)]
    for step in range(3):
        chart.add(step, rows[0])
    before = chart.add(3, rows[0])
    chart.add(4, rows[1])
    chart.add(5, rows[1])
    assert chart.since is not None
    assert chart.add(3, rows[0]) == before and chart.since is None


def test_generations_of_a_step_are_points_and_those_of_the_first_step_are_no_reference(reference):
    chart = RunChart(read_reference(reference), Trend(metrics=("k3_nats",)))
    places = [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]
    added = [chart.add(n, {"k3_nats": 0.0}, generation)[0] for n, generation in places]
    assert [c.outcome == "not applicable" for c in added] == [True, True, False, False, False]
    assert [cell.n for cell in added[2:]] == [1, 2, 3]


def test_references_that_promise_nothing_say_so(folder):
    code, text = servanda("contract", "calibrate", folder / "good-0.jsonl")
    assert code == 0 and "one good run shows no spread between runs" in text
    assert "assumed" not in text and read_of(folder, 1).assumptions == ()
    assert read_of(folder, 1).detector.false_alarms is None
    assert read_of(folder, 3).detector.false_alarms == 1 / 4


def test_a_promise_names_its_assumptions_in_reports_and_cells(folder, reference):
    runs = [folder / f"good-{i}.jsonl" for i in range(3)]
    _, text = servanda("contract", "calibrate", *runs)
    names = ("exchangeable_runs", "reference_runs")
    assert all(ASSUMPTIONS[name].text in text for name in names)
    chart = RunChart(read_reference(reference))
    chart.add(0, {"k3_nats": 1e-4})
    assert {cell.assumptions for cell in chart.add(1, {"k3_nats": 1e-4})} == {names}


def read_of(folder, runs):
    return Reference.of([recorded_run(folder / f"good-{i}.jsonl") for i in range(runs)], 0.05)


def test_bad_references_are_refused(folder, reference, tmp_path):
    one = folder / "good-0.jsonl"
    assert "is given twice" in servanda("contract", "calibrate", one, one)[1]
    saved = "--save-reference", tmp_path / "r.json"
    code, text = servanda("contract", "calibrate", tmp_path / "none.jsonl", *saved)
    assert code == 2 and "hint: name the state file of a monitor, or the folder of a dump" in text
    newer = tmp_path / "newer.jsonl"
    newer.write_text(
        one.read_text()
        .replace('"schema":2,', '"schema":3,')
        .replace('"schema": 2,', '"schema": 3,')
    )
    code, text = servanda("contract", "calibrate", newer, *saved)
    assert code == 2 and "has schema 3, and this version of Servanda reads schema 2" in text
    changed = tmp_path / "changed.json"
    changed.write_text(json.dumps({**json.loads(reference.read_text()), "steps": 99}))
    with pytest.raises(ContractError, match="was changed after it was written"):
        read_reference(changed)
    with pytest.raises(ContractError, match="cannot be read"):
        Monitor("trl", reference=tmp_path / "none.json")
    with pytest.raises(ContractError, match="and the contract names 0123"):
        read_reference(reference, "0123")
    with pytest.raises(ContractError, match="has no metric 'k4_nats'"):
        RunChart(read_reference(reference), Trend(metrics=("k4_nats",)))
    short = GoodRun("short", "", tuple((i, {"k3_nats": 1.0}) for i in range(4)))
    with pytest.raises(EvidenceError, match="5 steps in every run, the first step aside"):
        Reference.of([short], 0.05)
