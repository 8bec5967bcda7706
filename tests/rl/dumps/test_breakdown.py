# What an average over a dump does not show: steps, sequences, and what a filter removed.

import json
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner

from servanda.cli.main import main
from servanda.judgement.verdict import FORMATS, Verdict
from servanda.report.format import number
from servanda.rl.dumps.formats.parquet import Writer
from servanda.rl.dumps.judge import DumpOptions, judge_dump
from servanda.rl.dumps.report import render
from servanda.rl.dumps.statistics import Outliers, ScoredTokens
from servanda.rl.steps.blocks import paired
from servanda.traces.rollouts import Rollouts
from tests.rl.dumps import made


def judged(folder, **asked):
    return judge_dump(DumpOptions(folder, **asked))


def servanda(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


# steps


@pytest.mark.slow
@pytest.mark.parametrize("bad", [1, 6, 12])
def test_one_violated_step_makes_the_dump_violated_and_is_named(tmp_path, bad):
    made.write(tmp_path, tv=lambda step, *_: 0.07 if step == bad else 0.004)

    answer = judged(tmp_path)

    assert answer.verdict.exit_code == 1
    text = render(answer)
    assert f"VIOLATED at step {bad}, judged alone" in text
    assert f"11 hold, 1 violated (step {bad})" in text
    whole = [c for c in answer.verdict.cells if c.place == "all" and c.enforced]
    means = [c for c in whole if c.metric in ("tv", "abs_log_ratio_nats")]
    assert means and all(c.outcome == "holds" for c in means)
    cell = next(c for c in answer.verdict.cells if c.steps == (bad, bad))
    assert cell.outcome == "violated" and cell.interval[0] <= 0.07 <= cell.interval[1]
    watched = servanda("watch", tmp_path, "--once")
    assert watched.exit_code == 1
    assert f"would have stopped at step {bad}" in watched.stdout


def test_the_course_of_the_whole_has_a_point_per_step_and_an_interval_of_that_step(tmp_path):
    verdict = judged(made.write(tmp_path, tv=lambda step, *_: 0.07 if step > 8 else 0.004)).verdict

    whole, *slices = verdict.breakdown.series
    rows = verdict.breakdown.steps
    assert whole.slice == "all" and [p.step for p in whole.points] == [row.step for row in rows]
    assert whole.since == 9
    for point, row in zip(whole.points, rows, strict=True):
        # the mean of a cell is that of its bins
        assert point.mean == pytest.approx(row.tv, rel=1e-3) and point.tokens == row.tokens
        assert point.low <= point.mean <= point.high
    assert len(slices) <= 3
    # nine tenths of 1 - 0.95: the page says what the intervals were computed with
    assert whole.confidence == pytest.approx(0.955)
    assert "Bar: 95.5 % per side" in FORMATS["html"](verdict)
    assert Verdict.from_dict(json.loads(FORMATS["json"](verdict))).breakdown == verdict.breakdown


def test_every_format_says_the_same_of_a_violated_step(tmp_path):
    verdict = judged(made.write(tmp_path, tv=lambda step, *_: 0.07 if step == 6 else 0.004)).verdict
    for name in ("text", "markdown", "html", "junit", "github", "sarif"):
        assert "step-6" in FORMATS[name](verdict).replace("\\", ""), name
    for name in ("markdown", "html"):
        assert "Each step judged alone: 11 hold, 1 violated" in FORMATS[name](verdict)
    data = json.loads(FORMATS["json"](verdict))
    rows = data["breakdown"]["steps"]
    assert [row["step"] for row in rows if row["outcome"] == "violated"] == [6]
    assert rows[5]["tv"] == pytest.approx(0.07, abs=0.01)
    assert Verdict.from_dict(data).breakdown == verdict.breakdown
    del data["breakdown"]  # as it was stored before there was one
    assert Verdict.from_dict(data).breakdown is None


@pytest.mark.slow
def test_a_slice_of_a_few_steps_is_judged_with_the_steps_before(tmp_path):
    """Too few tokens a step to decide, and averaged away over all."""
    bad = range(10, 18)
    tv = lambda step, _s, turn, i: 0.3 if step in bad and turn > 1 and i < 3 else 0.002  # noqa: E731
    made.write(tmp_path, steps=range(1, 61), n=16, turns=3, turn_tokens=8, tv=tv)

    answer = judged(tmp_path)

    assert answer.verdict.exit_code == 1
    red = [c.slice for c in answer.verdict.cells if c.enforced and c.outcome == "violated"]
    assert any("start-2" in name or "turn" in name for name in red)


@pytest.mark.slow
def test_a_long_healthy_dump_has_no_violated_step(tmp_path):
    answer = judged(made.write(tmp_path, steps=range(1, 151), n=4, tv=0.015))
    assert answer.verdict.exit_code == 0
    assert len(answer.verdict.breakdown.steps) == 150
    assert not any(row.outcome == "violated" for row in answer.verdict.breakdown.steps)
    assert "the worst 20 (JSON has all)" in FORMATS["markdown"](answer.verdict)


def test_steps_that_are_too_small_to_be_judged_are_no_pass_in_silence(tmp_path):
    answer = judged(made.write(tmp_path, steps=range(1, 21), n=4, turn_tokens=16, tv=0.004))
    assert answer.verdict.exit_code == 0
    spots = [spot.text for spot in answer.verdict.blind_spots if spot.subject == "sample"]
    assert any(text.startswith("3 of 20 steps are too small to be judged: ") for text in spots)
    assert any(text.startswith("17 of 20 steps hold only together with ") for text in spots), spots
    how = "each step, with those before it where it does not decide"
    assert f"{how}: 17 hold, 3 inconclusive" in render(answer)


def test_steps_add_up_to_the_dump(tmp_path):
    answer = judged(made.write(tmp_path, n=10, tv=lambda step, *_: 0.001 * step))
    rows = answer.verdict.breakdown.steps
    total = answer.verdict.portraits["infer"].total
    assert sum(row.tokens for row in rows) == total.n
    for name in ("tv", "abs_log_ratio", "exp_abs", "k3"):
        summed = sum(getattr(row, name) * row.tokens for row in rows)
        assert summed == pytest.approx(getattr(total, name), rel=1e-9)


def test_an_empty_step_among_others_is_said(tmp_path):
    made.write(tmp_path, steps=range(1, 4))
    Writer(tmp_path).step(4, [], [], [], [])
    text = render(judged(tmp_path))
    assert "! step 4 has no sequence that can be used (first: step_000004.rank0.parquet)" in text


# sequences


def test_one_bad_sequence_in_twenty_is_named_though_the_average_holds(tmp_path):
    made.write(tmp_path, n=20, turn_tokens=256, tv=lambda _, s, *__: 0.09 if s == 7 else 0.003)

    answer = judged(tmp_path)

    found = answer.verdict.breakdown
    assert found.beyond == 12
    assert {row.source.rpartition(":")[2] for row in found.sequences} == {"8"}
    text = render(answer)
    assert "! 12 of 240 sequences are above the limit on their own tokens" in text
    assert "of all mismatch" in text
    for name in ("markdown", "html"):
        assert "12 of all are beyond" in FORMATS[name](answer.verdict)


def rollouts_of(x_ST, step=1):
    """Sequences whose (1 - w)^+ is given, [S, T]."""
    sequences, tokens = x_ST.shape
    infer = np.full(x_ST.size, -1.0)
    return Rollouts(
        step,
        np.full(sequences, tokens),
        np.zeros(x_ST.size, dtype=np.int64),
        np.ones(x_ST.size, dtype=bool),
        infer + np.log1p(-np.minimum(x_ST.ravel(), 1 - 1e-12)),
        infer,
        tuple(f"g{s}" for s in range(sequences)),
        tuple(f"f:{s + 1}" for s in range(sequences)),
    )


@pytest.mark.parametrize(("step", "before"), [(1, 0), (1, 3), (4, 0), (4, 3)])
def test_a_sequence_costs_its_number_in_its_step(step, before):
    """2/((t + 1)(t + 2)) of alpha for step t, of which sequence s has 1/(s (s + 1))."""
    x_K = np.array([0.3, 0.0, 0.9, 0.2, 0.5, 0.0, 0.6, 0.4])
    grown = [np.log1p(bet * x_K) - np.log1p(bet * 0.025) for bet in (3.0, 30.0)]
    log_e = float(np.logaddexp(*(g.sum() for g in grown)) - np.log(2))
    s = before + 2
    alpha = np.exp(-log_e) * s * (s + 1) * (step + 1) * (step + 2) / 2
    for factor, beyond in ((1 + 1e-9, 1), (1 - 1e-9, 0)):
        outliers = Outliers(0.025, step, alpha * factor)
        for x_ST in (np.zeros((before, 8)), np.stack([np.zeros(8), x_K]))[not before :]:
            block = rollouts_of(x_ST)
            outliers.add(block, ScoredTokens(paired(block, 0)))
        assert outliers.beyond == beyond


def test_the_numbers_of_a_sequence_are_those_of_its_tokens():
    rng = np.random.default_rng(3)
    x = rng.random((30, 40)) * np.linspace(0.001, 0.3, 30)[:, None]
    outliers = Outliers(0.025)
    block = rollouts_of(x)
    for half in (slice(0, 10), slice(10, 30)):
        part = rollouts_of(x[half])
        part = replace(part, source_S=block.source_S[half], group_S=block.group_S[half])
        outliers.add(part, ScoredTokens(paired(part, outliers.sequences)))
    best, own = outliers.rows()[0], x[int(x.sum(axis=1).argmax())]
    assert (best.tokens, best.beyond) == (40, True)
    assert best.source == f"f:{int(x.sum(axis=1).argmax()) + 1}"
    assert best.tv == pytest.approx(own.mean())
    assert best.log_ratio == pytest.approx(np.log1p(-own).sum())
    assert best.exp_abs == pytest.approx(np.exp(-np.log1p(-own)).mean())
    assert best.share == pytest.approx(own.sum() / x.sum())


# filters


def filtered(folder, share, bad, *, lost=False, steps=8, good=0.003):
    """NeMo's dumps: a filter takes out the sequences whose kernels disagree."""
    rng = np.random.default_rng(5)
    for step in range(1, steps + 1):
        lines = []
        for s in range(20):
            out = s < 20 * share
            tokens, train, infer, mask = made.sequence(
                rng, 1, 64, lambda *_, tv=bad if out else good: tv
            )
            tokens = np.where(mask, tokens, step * 20 + s)
            lines.append({
                "token_ids": [tokens.tolist()],
                "token_loss_mask": [mask.astype(float).tolist()],
                "generation_logprobs": [np.where(mask, infer, 0.0).tolist()],
                "prev_logprobs": [np.where(mask & ~(out & lost), train, 0.0).tolist()],
                "input_lengths": [len(tokens)],
                "sample_loss_mask": [0.0 if out else 1.0],
            })  # fmt: skip
        folder.mkdir(exist_ok=True)
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"train_data_step{step}.jsonl").write_text(text)
    return folder


def test_what_a_filter_removed_keeps_a_dump_from_holding(tmp_path):
    answer = judged(filtered(tmp_path / "d", 0.1, 0.5))

    assert answer.verdict.exit_code == 3
    cell = next(c for c in answer.verdict.cells if (c.clause, c.slice) == ("gradient", "all"))
    assert cell.outcome == "inconclusive" and "before it" in cell.note
    assert cell.missing == 8 * 2 * 64
    removed = answer.verdict.breakdown.removed
    assert (removed.sequences, removed.of_sequences) == (16, 160)
    assert (removed.tokens, removed.of_tokens) == (1024, 10240)
    assert removed.tv == pytest.approx(0.5, abs=0.05)
    assert removed.kept == pytest.approx(0.003, abs=0.001)
    assert removed.before == pytest.approx(0.1 * removed.tv + 0.9 * removed.kept)
    text = render(answer)
    assert "! a filter removed 16 of 160 sequences (10.0 % of the tokens)" in text
    assert "INCONCLUSIVE: it holds only after a filter; before the filter it is viol" in text
    for name in ("markdown", "html"):
        assert "a filter removed 16 of 160 sequences" in FORMATS[name](answer.verdict)


def test_a_filter_for_another_reason_changes_no_answer(tmp_path):
    answer = judged(filtered(tmp_path / "d", 0.1, 0.003))
    assert answer.verdict.exit_code == 0
    assert "✓ a filter removed 16 of 160 sequences" in render(answer)
    kept = next(c for c in answer.verdict.cells if c.metric == "kept_ratio")
    assert (kept.value, kept.outcome, kept.enforced) == (0.9, "holds", False)


def test_a_filter_that_removes_much_is_shown_and_can_be_enforced(tmp_path):
    answer = judged(filtered(tmp_path / "d", 0.4, 0.003))
    kept = next(c for c in answer.verdict.cells if c.metric == "kept_ratio")
    assert (kept.value, kept.outcome) == (pytest.approx(0.6), "violated")
    assert "a filter removed 4,096 of 10,240 tokens before training" in render(answer)
    assert "kept_ratio, at_least: 0.9" in answer.contract_text


def test_what_was_removed_and_never_scored_is_missing(tmp_path):
    answer = judged(filtered(tmp_path / "d", 0.1, 0.003, lost=True))
    assert answer.verdict.exit_code == 3
    assert answer.verdict.breakdown.removed.tv is None
    spot = next(spot for spot in answer.verdict.blind_spots if spot.subject == "rows")
    assert spot.text.endswith("their divergence is unknown")
    cell = next(c for c in answer.verdict.cells if (c.clause, c.slice) == ("gradient", "all"))
    assert cell.note == "holds only after a filter: before it not known, not decided"
    text = render(answer)
    assert "both logprobs are there" not in text
    assert "holds only after a filter; before the filter it is not decided." in text


def test_a_step_that_a_filter_emptied_is_told_as_such(tmp_path):
    made.each(tmp_path, lambda _, r: made.without(r, np.full(len(r), r.step == 3)))
    text = render(judged(tmp_path))
    assert "too small to be judged" not in text
    assert "step 3: no token was trained on" in text
    assert "11 hold, 1 inconclusive" in text


def test_a_step_that_lacks_logprobs_is_an_error_of_the_dump_as_of_a_watch(tmp_path):
    """One token in 200 of one step, and 1 in 6,000 of the dump, which alone may be missing."""

    def lossy(rng, r):
        lost_N = r.mask_N & (rng.random(len(r.mask_N)) < (0.005 if r.step == 3 else 0))
        return replace(r, logp_train_N=np.where(lost_N, np.nan, r.logp_train_N))

    made.each(tmp_path, lossy, steps=range(1, 31), turn_tokens=64)
    verdict = judged(tmp_path).verdict
    assert [row.step for row in verdict.breakdown.steps if row.outcome == "error"] == [3]
    assert verdict.exit_code == 4
    assert "UNSOUND: step 3: both logprobs present on " in render(judged(tmp_path))
    watched = CliRunner().invoke(main, ["watch", str(tmp_path), "--once"])
    assert watched.exit_code == 4 and "step 3      ! error" in watched.output


def test_a_step_with_an_infinite_log_ratio_has_no_blanks(tmp_path):
    def broken(_, r):
        if r.step != 3:
            return r
        train_N = r.logp_train_N.copy()
        train_N[int(r.mask_N.argmax())] = -np.inf
        return replace(r, logp_train_N=train_N)

    made.each(tmp_path, broken, turn_tokens=64)
    assert "mean |Δ logp| infinite, TME infinite" in render(judged(tmp_path))


def test_a_watch_says_of_a_filter_as_a_check_does(tmp_path):
    filtered(tmp_path / "d", 0.1, 0.5)
    assert "inconclusive" in servanda("watch", tmp_path / "d", "--once").stdout


def test_a_sequence_without_a_mask_that_both_sides_scored_was_removed_in_any_format(tmp_path):
    writer, rng = Writer(tmp_path), np.random.default_rng(0)
    for step in range(1, 5):
        r = made.rollouts(rng, step, 20, turn_tokens=64, tv=lambda _, s, *__: 0.4 * (s == 0))
        made.store(writer, replace(r, mask_N=r.mask_N & (r.sequence_N != 0)))
    removed = judged(tmp_path).verdict.breakdown.removed
    assert (removed.sequences, removed.tokens) == (4, 256)
    assert removed.tv == pytest.approx(0.4, abs=0.1) and removed.kept == 0


# one rule


@pytest.mark.parametrize("above", [0.0, 4e-4])
def test_the_mean_weight_has_one_answer_and_one_number_in_every_format(tmp_path, above):
    """Up to a thousandth above 1 moves no verdict: neither the text nor the clause may differ."""
    rng, writer = np.random.default_rng(0), Writer(tmp_path)
    for step in range(1, 9):
        infer = -rng.exponential(1.0, (20, 300)) - 0.2
        train = infer + rng.normal(above, 1e-3, infer.shape)
        writer.step(step, rng.integers(0, 999, (20, 310)), np.ones((20, 300)), train, infer)
    answer = judged(tmp_path)
    cell = next(c for c in answer.verdict.cells if c.metric == "coherence")
    finding = next(t for t in answer.lines if "mean importance weight" in t.text)
    assert (cell.outcome == "holds") == (finding.level == "fine")
    assert cell.note == finding.text
    assert cell.value == pytest.approx(1 + above, abs=1e-4)
    assert f"mean w {number(cell.value)} " in render(answer)
    assert f" {number(cell.value)} " in FORMATS["markdown"](answer.verdict)


def test_the_panel_has_the_numbers_of_a_trainer(tmp_path):
    answer = judged(made.write(tmp_path, n=10, tv=0.02))
    total = answer.verdict.portraits["infer"].total
    (panel,) = [line for line in render(answer).splitlines() if line.startswith("panel")]
    assert f"mean |Δ logp| {total.mean('abs_log_ratio'):.3g}" in panel
    assert f"TME {number(total.mean('exp_abs'))}" in panel and f"k3 {total.mean('k3'):.3g}" in panel
    assert "±1 %" in panel
    # two tokens: |w - 1| is tv / Q and tv / (1 - Q), so that its mean is 2 tv
    apart = float(panel.rpartition("mean |w - 1| ")[2])
    assert apart == pytest.approx(0.04, abs=0.002)
