# The reward gap, against enumeration of the tables: what it reads, and what it refuses.

import json
import math
import re
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest

from servanda.cli.cost_table import plan_lines
from servanda.contract.identity import EvidenceKey
from servanda.contract.model import Sampling
from servanda.engines.table import TableEngine
from servanda.errors import ContractError, Interrupted, MeasurementError
from servanda.judgement.clauses.base import DRAWS, REWARD
from servanda.judgement.clauses.fidelity import REJECTION_OF_TRAIN
from servanda.judgement.clauses.reward_gap import RewardGap
from servanda.judgement.cost import cost_of
from servanda.judgement.verdict import FORMATS, judge
from servanda.report.explain.contract import explain_contract
from servanda.report.summary import headline
from servanda.runner import run
from servanda.runner.compare.reference import measure_pack
from servanda.runner.measurement import scorer_of
from servanda.runner.probe import Engines, probe
from servanda.runner.round_files import read_rounds
from servanda.runner.run_directory import opened
from servanda.traces.corpus import Corpus
from tests import kit
from tests.table_pair import TablePair

P = {"": kit.BASE, "a": [0.1, 0.3, 0.3, 0.2, 0.1]}
FAR = {"": kit.moved(kit.BASE, 0.12), "a": kit.moved(P["a"], 0.05)}
NEAR = {"": kit.moved(kit.BASE, 0.02), "a": P["a"]}
PROMPTS = ((0,), (1,), (2,))
WIDTH = 4
OWN = "def score(prompt, answer):\n    return 'a' in answer.split()\n"


def reward(ids):
    """What OWN gives, of token ids."""
    return float(0 in ids)


def write(folder, *, limit=0.2, of="rewards.py:score", source=OWN, span="[0, 1]", **more):
    """A contract with a reward gap, and the exact tables."""
    folder.mkdir(exist_ok=True)
    (folder / "rewards.py").write_text(source)
    extra = {"q": FAR, "width": WIDTH, "last": 1500, "limit": 0.8, **more}
    clause = extra.pop("clause", f"{{id: gap, metric: reward_gap, at_most: {limit}}}")
    declared = f"reward: {{range: {span}, of: {of}}}\n{extra.pop('slices', '')}"
    return kit.write(folder, p=P, more=f"  - {clause}", slices=declared, **extra)


def check(path, folder=None, **options):
    return run.check(path, run_dir=(folder or path.parent) / "run", open=run.in_process, **options)


def gap_of(verdict, clause="gap"):
    (cell,) = (c for c in verdict.cells if c.clause == clause)
    return cell


def rewrite(folder, lines):
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def truth(pair):
    """E R_infer - E R_train over the prompts, by enumeration."""
    return -np.mean([pair.reward_drift(prompt, WIDTH, reward) for prompt in PROMPTS])


@pytest.mark.parametrize("claim", ["population", "realised"])
def test_the_gap_is_what_enumeration_says_of_both_kernels_answers(tmp_path, claim):
    path, pair = write(tmp_path, claim=claim, clause="{id: gap, metric: reward_gap, at_most: 0.45}")
    cell = gap_of(check(path))
    assert truth(pair) < -0.1
    assert cell.outcome == "holds" and cell.kind == "certificate"
    assert cell.interval[0] < truth(pair) < cell.interval[1]
    assert cell.value == pytest.approx(truth(pair), abs=0.06)
    assert cell.units == ("prompt groups" if claim == "population" else "sequences")
    assert cell.assumptions == ("order", "own_law", *(["independent"] * (claim == "population")))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("claim", ["population", "realised"])
@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize(("limit", "outcome"), [(0.4, "holds"), (0.02, "violated")])
def test_it_is_judged_from_both_sides(tmp_path, claim, swap, limit, outcome):
    """Whichever of the two kernels earns more."""
    path, _ = write(tmp_path, limit=limit, claim=claim)
    if swap:
        p, q = tmp_path / "p.json", tmp_path / "q.json"
        p.rename(tmp_path / "was.json")
        q.rename(p)
        (tmp_path / "was.json").rename(q)
    cell = gap_of(check(path))
    assert cell.outcome == outcome
    assert (cell.value > 0) == swap


@pytest.mark.slow
@pytest.mark.parametrize("claim", ["population", "realised"])
def test_the_answer_is_that_of_the_interval_at_its_price(tmp_path, claim):
    """An end of the interval is where the evidence just pays half of alpha."""
    path, _ = write(tmp_path, limit=0.3, claim=claim, last=320)
    plan = run.compile(run.load(path))
    pairs = run.measure(plan, tmp_path / "run", open=run.in_process)
    cell = gap_of(judge(plan, run.weigh(plan, pairs)))
    at_end = max(map(abs, cell.interval))
    outcomes = set()
    for factor in (0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.2):
        limit = factor * at_end
        text = re.sub(r"(reward_gap, at_most: )[\d.]+", rf"\g<1>{limit:.6f}", path.read_text())
        path.write_text(text)
        other = run.compile(run.load(path))
        found = gap_of(judge(other, run.weigh(other, pairs)))
        low, high = found.interval  # its weights are those of the limit, too
        holds = -limit <= low and high <= limit
        assert (found.e_holds >= math.log(1 / found.alpha)) == holds
        outcomes.add(holds)
    assert outcomes == {True, False}


@pytest.mark.slow
def test_a_gap_at_its_limit_stays_open(tmp_path):
    path, pair = write(tmp_path, limit=round(abs(0.98 * truth(write(tmp_path)[1])), 4), last=320)
    cell = gap_of(check(path))
    assert cell.outcome == "inconclusive"
    assert cell.interval[0] < truth(pair) < cell.interval[1]


def test_identical_kernels_read_exactly_0(tmp_path):
    """Their draws are coupled, so each prompt has the same answer twice."""
    path, _ = write(tmp_path, q=P, limit=0.1, last=96)
    cell = gap_of(check(path))
    assert cell.value == 0.0 and cell.outcome == "holds"
    assert cell.note.startswith("infer earns 0.") and "on average, train 0." in cell.note
    needed = RewardGap(0.1, 1.0).units_at_best(cell.alpha)
    assert needed <= cell.n <= needed + 32


def test_the_draws_of_near_kernels_mostly_agree(tmp_path):
    """Independent draws of 4 tokens would agree once in a hundred times."""
    path, _ = write(tmp_path, q=NEAR, last=96)
    check(path)
    infer, train = traces(path)
    same = [a == b for a, b in zip(infer.continuations, train.continuations, strict=True)]
    assert 0.9 < np.mean(same) < 1.0


def traces(path, index=0):
    """What both kernels drew in a round."""
    with opened(path.parent / "run") as kept:
        return [kept.read(f"rounds/{index:06d}.{what}") for what in ("infer", DRAWS)]


@pytest.mark.slow
def test_coupled_draws_follow_their_own_kernels(tmp_path):
    """What train draws beside infer has train's law: the reward's mean is that of its table."""
    path, pair = write(tmp_path, last=1500, clause="{id: gap, metric: reward_gap, at_most: 0.001}")
    path.write_text(path.read_text().replace("at_most: 0.001", "at_most: 0.001, mode: monitor"))
    path.write_text(path.read_text().replace("prompt_groups: [32", "prompt_groups: [1500"))
    check(path)
    expected = np.mean(
        [sum(p * reward(y) for y, p, _ in pair.sequences(prompt, WIDTH)) for prompt in PROMPTS]
    )
    found = []
    for index in range(1500 // 32):
        drawn = traces(path, index)[1]
        found += [reward(ids) for ids in drawn.continuations]
    assert np.mean(found) == pytest.approx(expected, abs=4 * 0.5 / math.sqrt(len(found)))


def test_the_reward_is_kept_with_the_answer(tmp_path):
    path, _ = write(tmp_path, last=32)
    check(path)
    for trace in traces(path):
        starts = np.cumsum(trace.length_S) - trace.length_S
        found = trace.columns[REWARD]
        assert found[starts].tolist() == [reward(ids) for ids in trace.continuations]
        assert np.array_equal(found, np.repeat(found[starts], trace.length_S))
        assert trace.about["path"] == "decode"


def test_the_text_ends_before_the_token_that_ends_it(tmp_path):
    source = "def score(prompt, answer):\n    return '<eos>' in answer\n"
    path, _ = write(tmp_path, source=source, last=32)
    check(path)
    infer, _ = traces(path)
    assert 4 in infer.token_N
    assert not infer.columns[REWARD].any()


@pytest.mark.slow
def test_train_draws_with_a_transform_of_its_own(tmp_path):
    own = ", sampling: {temperature: 0.5}"
    path, pair = write(tmp_path, q=P, train=own, limit=0.4, first=1500)
    exact = TablePair(pair.train, pair.infer, train_sampling=Sampling(temperature=0.5))
    cell = gap_of(check(path))
    assert abs(truth(exact)) > 0.03
    assert cell.value == pytest.approx(truth(exact), abs=0.05)


COLD = ", fault: {undisclosed_temperature: 0.2}"


def test_a_train_kernel_that_draws_otherwise_than_it_scores_is_refuted(tmp_path):
    """Identical tables; train scores as it should, and answers nearly greedily."""
    path, _ = write(tmp_path, q=P, train=COLD, limit=0.1, first=320, last=640)
    verdict = check(path)
    fidelity = next(c for c in verdict.cells if c.metric == "sampler_fidelity")
    assert fidelity.outcome == "violated"
    assert fidelity.note == REJECTION_OF_TRAIN
    assert headline(verdict).text.startswith("What train draws does not follow")
    gap = gap_of(verdict)
    assert gap.outcome == "inconclusive" and "precondition failed" in gap.note


@pytest.mark.slow
def test_an_honest_train_kernel_is_not_refuted(tmp_path):
    path, _ = write(tmp_path, q=P, train=", path: prefill", limit=0.4, first=320, last=640)
    (found,) = (c for c in check(path).cells if c.metric == "sampler_fidelity")
    assert (found.outcome, found.note) == ("holds", "not rejected")


class Elsewhere(TableEngine):
    """Says another path of the answers it draws, or none."""

    said: ClassVar = {}

    def generate(self, *args):
        trace = super().generate(*args)
        about = {k: v for k, v in trace.about.items() if k != "path"} | self.said
        return replace(trace, about=about)


@pytest.mark.parametrize("declared", ["", ", path: prefill"])
@pytest.mark.parametrize(
    ("said", "told", "hint"),
    [
        (
            {"path": "prefill"},
            "recorded path prefill, and answers are drawn by decode",
            "scoring a prompt does not certify decoding",
        ),
        (
            {},
            "does not record by which path it drew its answers",
            'let the trace of Engine.generate say about={"path": "decode"}',
        ),
    ],
)
def test_train_says_that_it_draws_by_decoding_whatever_path_it_scores_by(
    tmp_path, declared, said, told, hint
):
    made = type("Made", (Elsewhere,), {"said": said})
    path, _ = write(tmp_path, train=declared)
    with pytest.raises(MeasurementError) as caught:
        run.check(
            path,
            run_dir=tmp_path / "run",
            open=lambda kernel, side: (made if side == "train" else TableEngine)(kernel),
        )
    assert f"the train engine 'table' {told}" in str(caught.value)
    assert hint in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("claim", ["population", "realised"])
def test_an_answer_that_train_lost_counts_against_both(tmp_path, claim):
    lost = ", fault: {lost_sequences: 0.5}"
    path, _ = write(tmp_path, q=P, train=lost, limit=0.3, claim=claim, last=640)
    cell = gap_of(check(path))
    share = cell.missing / cell.n
    assert 0.2 < share < 0.6 and cell.value == 0.0
    assert cell.outcome == "inconclusive"
    assert cell.interval[0] < -share and share < cell.interval[1]


def test_a_reward_that_nobody_can_earn_is_told(tmp_path):
    path, _ = write(tmp_path, source="def score(prompt, answer):\n    return 0\n", last=96)
    cell = gap_of(check(path))
    told = "every answer of both kernels has the reward 0: is it the one you mean?"
    assert cell.outcome == "holds" and cell.note == told


# a reward from the corpus


def test_exact_answer_reads_the_lines_answer(tmp_path):
    path, pair = write(tmp_path, of="exact_answer", limit=0.3)
    answers = {"a": "b", "b": "b c", "c": "a"}
    rewrite(tmp_path, [{"prompt": p, "answer": a} for p, a in answers.items()])
    cell = gap_of(check(path))
    exact = [(1, 4), (1, 2, 4), (0, 4)]
    gaps = [
        -pair.reward_drift(prompt, WIDTH, lambda y, right=right: float(y == right))
        for prompt, right in zip(PROMPTS, exact, strict=True)
    ]
    assert cell.value == pytest.approx(np.mean(gaps), abs=0.03)
    assert cell.interval[0] < np.mean(gaps) < cell.interval[1]


def test_lines_outside_of_every_such_slice_are_not_scored(tmp_path):
    slices = "slices: [{name: sums, match: {labels.first: {in: [a]}}}]"
    clause = "{id: gap, metric: reward_gap, at_most: 0.4, slices: sums}"
    path, _ = write(tmp_path, of="exact_answer", slices=slices, clause=clause, last=600)
    asked = {"prompt": "a", "labels": {"first": "a"}, "answer": 7}
    rewrite(tmp_path, [asked, {"prompt": "b", "labels": {"first": "b"}}])
    cell = gap_of(check(path))
    assert cell.slice == "sums" and 0 < cell.n < 600
    reward_N = traces(path)[0].columns[REWARD]
    assert np.isnan(reward_N).any() and not np.isnan(reward_N).all()


def test_a_line_without_an_answer_is_named_before_anything_runs(tmp_path):
    of_b = "{name: b, match: {labels.first: {in: [b]}}}"
    slices = f"slices: [{{name: first, split: labels.first}}, {of_b}]"
    path, _ = write(tmp_path, of="exact_answer", slices=slices)
    lines = [{"prompt": p, "labels": {"first": p}} for p in "ab"]
    rewrite(tmp_path, [lines[0], lines[1] | {"answer": "b"}])
    with pytest.raises(ContractError) as caught:
        check(path)
    (problem,) = caught.value.problems
    assert "needs exact_answer on slice 'all'" in problem.message
    assert problem.message.endswith("prompts.jsonl:1 has no 'answer'")
    assert problem.hint.startswith("name slices: [b], whose lines have one; or name a reward.of")
    rewrite(tmp_path, lines)
    with pytest.raises(ContractError) as caught:
        check(path)
    assert "declare a slice of the lines that have one" in str(caught.value)


@pytest.mark.parametrize("answer", [True, ["606"], {"sum": 606}])
def test_an_answer_is_a_text_or_a_number(answer):
    lines = [{"prompt": "1+1", "answer": 2}, {"prompt": "2"}, {"prompt": "3", "answer": answer}]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    with pytest.raises(ContractError, match=r"p\.jsonl:3:1: 'answer' is a text or a number"):
        Corpus.parse(text, "p.jsonl")
    whole = Corpus.parse(text.rpartition("{")[0].rpartition("\n")[0], "p.jsonl")
    assert [p.answer for p in whole.prompts] == ["2", None]
    assert whole.given(0) == lines[0]


# a function of the contract's own


def failing(tmp_path, source, of="rewards.py:score", span="[0, 1]"):
    path, _ = write(tmp_path, source=source, of=of, span=span, last=32)
    with pytest.raises(MeasurementError) as caught:
        check(path)
    return str(caught.value)


def test_a_function_is_given_the_whole_line(tmp_path):
    source = (
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n"
        "@dataclass\n"
        "class Sum:\n"
        "    worth: float\n"
        "def score(prompt: dict, answer: str) -> float:\n"
        "    worth = prompt.pop('x-worth')\n"
        "    return Sum(worth).worth * (prompt['prompt'] in answer)\n"
    )
    path, _ = write(tmp_path, source=source, last=64)
    rewrite(tmp_path, [{"prompt": "a", "x-worth": 0.25}])
    check(path)
    assert set(traces(path)[0].columns[REWARD].tolist()) == {0.0, 0.25}


def test_a_reward_outside_of_its_range_names_the_line_and_the_value(tmp_path):
    told = failing(tmp_path, "def score(prompt, _):\n    return 1.5 * (prompt['prompt'] == 'b')\n")
    assert "the reward" in told and "infer's answer" in told
    assert "prompts.jsonl:2 is 1.5, outside of the declared range 0 to 1" in told
    assert "hint: declare the range that the reward has under reward.range" in told


@pytest.mark.parametrize(
    ("body", "shown"),
    [("float('nan')", "nan"), ("'good'", "'good'"), ("None", "None"), ("1j", "1j")],
)
def test_what_is_no_number_is_refused(tmp_path, body, shown):
    told = failing(tmp_path, f"def score(prompt, answer):\n    return {body}\n")
    assert f"is {shown}, and a number is wanted" in told


@pytest.mark.parametrize("call", ["sys.exit(0)", "exit(1)", "sys.exit()", "prompt['worth']"])
def test_a_function_that_raises_or_exits_is_named_by_its_line(tmp_path, call):
    told = failing(tmp_path, f"import sys\ndef score(prompt, answer):\n    {call}\n")
    assert told.startswith(f"{tmp_path}/rewards.py:3:1: the reward")
    assert "failed on infer's answer" in told
    assert ("SystemExit" if "exit" in call else "KeyError: 'worth'") in told


def test_an_interrupt_within_a_function_stops_the_run(tmp_path):
    source = "def score(prompt, answer):\n    raise KeyboardInterrupt\n"
    path, _ = write(tmp_path, source=source, last=32)
    with pytest.raises(Interrupted):
        check(path)


def test_what_a_function_prints_is_no_part_of_the_report(tmp_path, capsys):
    source = "print('loaded')\ndef score(prompt, answer):\n    print('scored')\n    return 1\n"
    path, _ = write(tmp_path, source=source, last=32)
    check(path)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "loaded\n" in shown.err and "scored\n" in shown.err


@pytest.mark.parametrize(
    ("source", "of", "message", "hint"),
    [
        (OWN, "rewards.py:scor", "has no function 'scor'", "did you mean 'score'?"),
        ("score = 1", "rewards.py:score", "has no function 'score'", "define score(prompt"),
        ("def f(:\n", "rewards.py:f", "cannot be run: SyntaxError", "it runs in isolation"),
        ("import nowhere\n", "rewards.py:f", "No module named 'nowhere'", "no file next to it"),
        (
            "raise SystemExit(3)",
            "rewards.py:f",
            "cannot be run: SystemExit: 3",
            "runs in isolation",
        ),
    ],
)
def test_a_function_that_cannot_be_had_is_said_before_a_kernel_is_opened(
    tmp_path, source, of, message, hint
):
    path, _ = write(tmp_path, source=source, of=of)

    def never(kernel, side):
        raise AssertionError("opened")

    with pytest.raises(MeasurementError) as caught:
        run.check(path, run_dir=tmp_path / "run", open=never)
    assert message in str(caught.value) and hint in str(caught.value)


def test_another_text_of_the_function_expires_the_evidence(tmp_path):
    path, _ = write(tmp_path, last=64)
    check(path)
    (tmp_path / "rewards.py").write_text(OWN + "# another text\n")
    with pytest.raises(MeasurementError, match="the reward changed since"):
        check(path)


def test_where_a_function_lies_is_no_part_of_what_evidence_is_for(tmp_path):
    one, two = (run.compile(run.load(write(tmp_path / name)[0])) for name in ("one", "two"))
    assert one.digest == two.digest and one.reward == two.reward != ""
    other = run.compile(run.load(write(tmp_path / "other", of="rewards.py:other")[0]))
    assert other.reward != one.reward and other.digest != one.digest
    assert EvidenceKey("", "", "", "", "", reward=one.reward).reward


def test_a_reward_that_no_clause_asks_for_is_not_loaded(tmp_path):
    clause = "{id: drift, metric: reward_drift, at_most: 0.9}"
    path, _ = write(tmp_path, source="raise ValueError", clause=clause, last=96)
    plan = run.compile(run.load(path))
    assert plan.reward == "" and scorer_of(plan) is None
    assert check(path).exit_code in (0, 3)
    assert not list((tmp_path / "run").rglob(f"*.{DRAWS}.parquet"))


# what lint says


@pytest.mark.parametrize(
    ("old", "new", "message", "hint"),
    [
        (
            "reward: {range: [0, 1], of: rewards.py:score}",
            "",
            "measured in the contract's reward, and none is declared",
            "declare reward: {range: [0, 1], of: exact_answer}",
        ),
        (", of: rewards.py:score", "", "reward: has no `of`", "of: rewards.py:score"),
        ("rewards.py:score", "exact_anser", "no reward is named 'exact_anser'", "'exact_answer'"),
        ("rewards.py:score", "score.txt:f", "is no function in a Python file", "FILE.py:FUNCTION"),
        ("rewards.py:score", "score.py:f(1)", "is no function in a Python", "FILE.py:FUNCTION"),
        ("rewards.py:score", "other.py:score", "there is no", "the contract's own folder"),
        ("at_most: 0.2}", "at_most: 1}", "is at most 1 here: a limit of 1 can", "below 1"),
        ("at_most: 0.2}", "at_most: 0}", "no sample can show that it is 0", "a limit above 0"),
        ("at_most: 0.2}", "at_least: 0.2}", "takes at_most", "write at_most"),
        ("at_most: 0.2}", "at_most: 0.002}", "would need at least", "raise `at_most`"),
        ("at_most: 0.2}", "at_most: 0.2, aggregate: p99}", "takes no aggregate", "remove"),
    ],
)
def test_lint_says_what_is_missing(tmp_path, old, new, message, hint):
    path, _ = write(tmp_path)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(ContractError) as caught:
        run.compile(run.load(path))
    (problem,) = caught.value.problems
    assert message in problem.message and hint in problem.hint
    assert problem.where is not None


# runs


@pytest.mark.slow
@pytest.mark.parametrize("gone", ["infer", "train", DRAWS])
def test_what_is_missing_of_a_round_is_drawn_again_bit_for_bit(tmp_path, gone):
    path, _ = write(tmp_path, limit=0.1, last=96)
    whole = check(path)
    victim = tmp_path / "run" / "attempt-1" / "rounds" / f"000001.{gone}.parquet"
    data = victim.read_bytes()
    victim.unlink()
    (tmp_path / "run" / "attempt-1" / "verdict.json").unlink()
    plan = run.compile(run.load(path))
    with opened(tmp_path / "run") as kept:
        assert len(list(read_rounds(plan, kept))) == 1  # a round counts only whole
    assert check(path) == whole
    assert victim.read_bytes() == data


def test_evidence_that_is_weighed_again_from_disk_is_the_same(tmp_path):
    path, _ = write(tmp_path, last=64)
    plan = run.compile(run.load(path))
    pairs = run.measure(plan, tmp_path / "run", open=run.in_process)
    assert judge(plan, run.weigh(plan, pairs)).evidence == check(path).evidence


@pytest.mark.slow
def test_two_workers_give_what_one_process_gives(tmp_path):
    path, _ = write(tmp_path, last=64)
    here = check(path)
    there = run.check(path, run_dir=tmp_path / "workers")
    assert gap_of(there) == gap_of(here)


def test_an_engine_without_texts_is_refused_by_name(tmp_path):
    class Mute(TableEngine):
        decode = None

    path, _ = write(tmp_path)
    with pytest.raises(MeasurementError, match="Mute has no verb 'decode'") as caught:
        run.check(path, run_dir=tmp_path / "run", open=lambda kernel, _: Mute(kernel))
    assert "implement Engine.decode" in str(caught.value)


def test_an_engine_that_cannot_draw_is_refused_by_name(tmp_path):
    class Scoring(TableEngine):
        generate = None

    def open_(kernel, side):
        return (Scoring if side == "train" else TableEngine)(kernel)

    path, _ = write(tmp_path)
    with pytest.raises(MeasurementError, match="Scoring has no verb 'generate'") as caught:
        run.check(path, run_dir=tmp_path / "run", open=open_)
    assert "an engine that only scores cannot be infer" in str(caught.value)


def test_the_answers_of_a_pack_have_rewards_too(tmp_path):
    """A pack holds no tokenizer: the other side reads its token ids, coupled with its own."""
    path, _ = write(tmp_path, limit=0.4, last=320)
    live = gap_of(check(path, tmp_path / "live"))
    measure_pack(run.load(path), "infer", tmp_path / "q.pack", open=run.in_process)
    packed = path.read_text().replace("table, model: q.json", "pack, model: q.pack")
    path.write_text(packed)
    assert gap_of(check(path, tmp_path / "packed")).value == live.value


def test_every_door_can_show_it(tmp_path):
    path, _ = write(tmp_path, limit=0.3)
    verdict = check(path)
    assert gap_of(verdict).outcome == "holds"
    for name in FORMATS:
        assert "gap" in FORMATS[name](verdict)
    plan = run.compile(run.load(path))
    assert "the train kernel generates responses of its own" in explain_contract(plan)
    with Engines(run.in_process) as engines:
        lengths, probed = probe(plan, engines, lambda _: None)
    assert DRAWS in probed.seconds
    cost = cost_of(plan, lengths, probed)
    assert "rewards  train answers the prompts of workload as well" in "\n".join(
        plan_lines(plan, cost)
    )
    fewer = dict(probed.seconds) | {DRAWS: 1e9}
    slow = cost_of(plan, lengths, type(probed)(**{**vars(probed), "seconds": fewer}))
    assert slow.seconds > cost.seconds
