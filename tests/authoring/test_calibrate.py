# `servanda contract calibrate`: limits that a good pair keeps, and the contract with them.

import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner

import servanda as sv
from servanda.authoring.calibrate.limits import FEWEST, Resampled
from servanda.cli import main
from servanda.engines.table import TableEngine
from servanda.runner import run
from servanda.theory.divergence.precision import captured, rounded
from tests import kit

# first tokens differ in how far the kernels are apart
PAIR = {"": kit.moved(kit.BASE, 0.01), "a": kit.moved(kit.BASE, 0.03), "c": kit.BASE}
WORSE = {"": kit.moved(kit.BASE, 0.03), "a": kit.moved(kit.BASE, 0.09), "c": kit.BASE}
MORE = """\
  # the tail, on the whole
  - {id: tail, metric: abs_log_ratio_nats, aggregate: p90, at_most: 5e-1, slices: [all]}
  - {id: k3, metric: k3_nats, aggregate: mean, clip: 1.0, at_most: 0.100, slices: [all]}
  - {id: shown, metric: tv, aggregate: mean, at_most: {times: 3.0, of: self_noise}, mode: monitor}
"""
SLICES = "slices: [{name: first, split: labels.first}]"


def call(*arguments):
    return CliRunner().invoke(main, ["contract", "calibrate", *map(str, arguments)])


def good(folder, *, seed=1, last=480, open=run.in_process, **options):
    """A finished run of a good pair with loose limits; returns its directory and contract."""
    options = {"q": PAIR, "more": MORE, "slices": SLICES, "limit": 0.5, "first": last} | options
    path, _ = kit.write(folder, seed=seed, last=last, **options)
    run.check(path, run_dir=folder / "run", open=open)
    return folder / "run", path


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A finished run, and the contract that was calibrated on it, in the same folder."""
    folder = tmp_path_factory.mktemp("good")
    run_dir, path = good(folder, slices=SLICES + "\n" + with_golden(folder))
    new = folder / "new.kernelcontract.yaml"
    answer = call(run_dir, "--save-contract", new)
    assert answer.exit_code == 0, answer.output
    return folder, path, new, answer


def with_golden(folder):
    fact = "{id: drift, metric: logit_osc_nats, aggregate: max, at_most: 9, slices: [all]}"
    return f"{kit.golden(folder)}\nnumerical: [{fact}]"


def outcome(folder, text, *, q=PAIR, seed):
    """Of a fresh run of a pair under the text of a contract."""
    kit.write(folder, q=q)
    kit.golden(folder)
    path = folder / "new.kernelcontract.yaml"
    path.write_text(re.sub(r"seed: \d+", f"seed: {seed}", text))
    return sv.check(path, run_dir=folder / "run", open=run.in_process).outcome


@pytest.mark.slow
def test_only_the_limits_of_the_contract_change(done):
    _, path, new, _ = done
    before = path.read_text().split("\n")
    written = new.read_text().split("\n")
    notes = [line for line in written if line.strip().startswith("# calibrated: was ")]
    after = [line for line in written if line not in notes]

    changed = [(a, b) for a, b in zip(before, after, strict=True) if a != b]

    assert len(changed) == 4  # tv, tail, k3, drift; not the one that is relative
    assert sorted(line.split()[-1] for line in notes) == ["0.1", "0.5", "0.5", "9"]
    for a, b in changed:
        limit = r"at_most: [-\d.e]+"
        assert re.sub(limit, "", a) == re.sub(limit, "", b)


def test_the_table_says_what_decides_and_what_binds(done):
    _, _, _, answer = done
    lines = answer.output.split("\n")

    assert re.match(r"toy: limits that a pair like the one in .* keeps", lines[0])
    assert lines[1] == ("resampled 500 times from 480 prompt groups: runs of 480, confidence 0.95")
    rows = {line.split(":")[0]: line for line in lines[3:8]}
    assert " first=a " in rows["tv"]
    # the largest log ratio there is: log(.28 / .25), after an a
    assert re.search(r" 0\.113 +0 +0\.5 +0\.12 +1\.00 +sampling$", rows["tail"])
    assert (
        "tail: no token of the run exceeds the limit, so the run says nothing about rarer ones"
    ) in lines
    assert any("fact: exact on the golden texts; no sampling, so no power" in x for x in lines)
    assert "shown: left as it is: its limit is relative to another measured value" in lines
    assert re.search(
        r"power: in 9\d\.\d % of these runs every calibrated clause holds\.", answer.output
    )
    assert "It does not cover a pair that drifts more than this one." in answer.output
    assert re.search(r"caught: \d+ of \d+ known faults", answer.output)


@pytest.mark.slow
def test_the_same_run_gives_the_same_limits(done):
    folder, _, new, _ = done
    again = folder / "again.kernelcontract.yaml"

    call(folder / "run", "--save-contract", again)

    assert again.read_text() == new.read_text()


def test_later_runs_hold_at_the_price_of_a_first_attempt(done, monkeypatch):
    folder, *_ = done
    prices = []
    name = "servanda.authoring.calibrate.limits.Resampled"
    monkeypatch.setattr(name, lambda *given: prices.append(given[-1]) or Resampled(*given))
    assert call(folder / "run").exit_code == 0
    assert prices == pytest.approx([-math.log(0.045)] * len(prices)) and prices


@pytest.mark.slow
def test_later_runs_of_the_pair_hold_and_a_pair_three_times_worse_is_violated(done, tmp_path):
    """The slow test counts; this one would see a limit that is off by much."""
    _, _, new, _ = done
    text = new.read_text()

    assert [outcome(tmp_path / f"{s}", text, seed=s) for s in (11, 12, 13)] == ["holds"] * 3
    assert outcome(tmp_path / "worse", text, q=WORSE, seed=14) == "violated"


@pytest.mark.slow
def test_a_higher_power_takes_higher_limits(done):
    folder, *_ = done
    limits = []
    for power in (0.5, 0.99):
        answer = call(folder / "run", "--power", power, "--format", "json")
        rows = {row["clause"]: row for row in json.loads(answer.stdout)["rows"]}
        limits.append(rows["tv"]["limit"])
        assert rows["drift"]["power"] is None and rows["drift"]["binds"] == "fact"
    assert limits[0] < limits[1]


def test_a_fact_is_what_was_measured_rounded_up(done):
    folder, *_ = done
    rows = json.loads(call(folder / "run", "--format", "json").stdout)["rows"]
    (drift,) = (row for row in rows if row["clause"] == "drift")

    assert drift["floor"] == 0.0
    assert drift["measured"] <= drift["limit"] <= 1.1 * drift["measured"]
    # osc of log(.38/.35, .22/.25): moved by .03 after an a
    assert drift["measured"] == pytest.approx(np.log(0.28 / 0.25) - np.log(0.32 / 0.35))


@pytest.mark.slow
def test_a_contract_that_moves_still_finds_its_files(done):
    folder, _, new, _ = done
    (folder / "sub").mkdir()
    moved = folder / "sub" / "moved.kernelcontract.yaml"

    answer = call(folder / "run", "--save-contract", moved)

    assert answer.exit_code == 0, answer.output
    assert "model: ../p.json" in moved.read_text()
    assert "prompts: ../prompts.jsonl" in moved.read_text()
    assert sv.load(moved).digest == sv.load(new).digest


@pytest.mark.slow
def test_realised_limits_speak_of_tokens(tmp_path):
    run_dir, _ = good(tmp_path, claim="realised", more="", slices="", last=160)
    of_tokens = json.loads(call(run_dir, "--format", "json").stdout)["rows"][0]["limit"]
    run_dir, _ = good(tmp_path / "p", claim="population", more="", slices="", last=160)
    of_groups = json.loads(call(run_dir, "--format", "json").stdout)["rows"][0]["limit"]

    assert 0.01 < of_tokens < of_groups


class Noisy(TableEngine):
    """A kernel whose logprobs hang on how many sequences run together."""

    def score(self, batch, sampling, path):
        trace = super().score(batch, sampling, path)
        logp_N = trace.columns["logp"] - (0.4 if len(batch) < 8 else 0.0)
        return replace(trace, columns={**trace.columns, "logp": logp_N})


def test_no_limit_is_below_twice_the_self_noise(tmp_path):
    run_dir, _ = good(tmp_path, open=lambda kernel, _: Noisy(kernel), more="", slices="")

    (row,) = json.loads(call(run_dir, "--format", "json").stdout)["rows"]

    assert row["binds"] == "self-noise"
    assert row["measured"] < row["floor"]
    assert 2 * row["floor"] <= row["limit"] < 2.2 * row["floor"]
    assert (
        "noise floor: twice the noise floor; no smaller difference is called violated"
        in call(run_dir).output
    )


@pytest.mark.slow
def test_the_standard_set_is_what_one_would_promise_of_any_pair(tmp_path):
    more = MORE + "reward: {range: [0, 2]}   # of an answer\n"
    slices = SLICES + "\n" + with_golden(tmp_path)
    run_dir, path = good(tmp_path, more=more, slices=slices, claim="realised", last=640)
    new = tmp_path / "standard.kernelcontract.yaml"

    answer = call(run_dir, "--standard", "--save-contract", new)

    assert answer.exit_code == 0, answer.output
    contract = sv.load(new)
    # p99.9 takes more tokens than there are, even of identical kernels
    assert [c.id for c in contract.numerical] == ["drift"]
    assert [c.id for c in contract.statistical] == ["tv", "tail", "k3", "reward"]
    assert all(isinstance(c.at_most, float) for c in contract.statistical)
    assert "reward: {range: [0, 2]}   # of an answer" in new.read_text()
    assert contract.kernels == sv.load(path).kernels
    # before, there was no limit
    assert re.search(r"^tv: mean tv +first=a +0\.0\d+ +0 +0\.\d+ +\d\.\d+ ", answer.output, re.M)


# refusals


TAIL = "  - {id: tail, metric: abs_log_ratio_nats, aggregate: p90, at_most: 0.5}"


def recorded(folder, capture):
    """A run of one kernel against itself, which is recorded that coarsely."""
    path, _ = kit.write(folder, q={"": kit.BASE}, limit=0.5, first=128, last=128, more=TAIL)
    data = json.loads((folder / "q.json").read_text())
    for name in ("p.json", "q.json"):
        (folder / name).write_text(json.dumps(data | {"capture": capture}))
    run.check(path, run_dir=folder / "run", open=run.in_process)
    return folder / "run"


def test_a_limit_that_the_record_cannot_carry_is_refused_or_raised_to_its_rounding(tmp_path):
    new = tmp_path / "new.yaml"
    answer = call(recorded(tmp_path, "bfloat16"), "--save-contract", new)

    assert answer.exit_code == 0
    assert re.search(r"^tail: .* 0\.5 +refused +record$", answer.output, re.M)
    assert (
        "tail: 1e-11 would do, and logprobs are recorded as bfloat16 (off by up to 7.8e-03): "
        "rounding alone reads as 7.8e-03; let the engine record its logprobs as float32 or float64"
    ) in answer.output
    assert sv.load(new).statistical[1].at_most == 0.5
    fine = call(recorded(tmp_path / "fine", "float32"))
    # half a unit in the last place of a logprob of 3 nats is 2^-23
    assert re.search(r"^tail: .* 0\.5 +1\.2e-07 +1\.00 +record$", fine.output, re.M)


@pytest.mark.slow
def test_a_percentile_is_kept_clear_of_noise_that_is_larger_than_the_gap(tmp_path):
    tail = "  - {id: tail, metric: abs_log_ratio_nats, aggregate: p90, at_most: 0.9}"
    run_dir, _ = good(tmp_path, open=lambda kernel, _: Noisy(kernel), more=tail, slices="")

    _, row = json.loads(call(run_dir, "--format", "json").stdout)["rows"]

    assert (row["binds"], row["limit"]) == ("self-noise", pytest.approx(0.4, abs=0.01))


@pytest.mark.parametrize("capture", ["bfloat16", "float16", "float32", "float64"])
def test_the_precision_of_a_record_is_read_off_it(capture):
    logp_N = -np.random.default_rng(1).exponential(3.0, 200)

    assert captured(rounded(logp_N, capture)) == capture


def test_a_run_that_has_nothing_to_calibrate_says_why(tmp_path):
    relative = "  - {id: own, metric: tv, aggregate: mean, at_most: {times: 9, of: self_noise}}"
    path, _ = kit.write(tmp_path, q=PAIR, first=96, last=96, more=relative)
    path.write_text(re.sub(r"  - \{id: tv,.*\n", "", path.read_text()))
    run.check(path, run_dir=tmp_path / "run", open=run.in_process)

    answer = call(tmp_path / "run")

    assert answer.exit_code == 4
    assert answer.output == (
        "no limit of this contract can be calibrated (own: its limit is relative to "
        "another measured value)\n"
    )


def refused(answer, text, code=4):
    assert (answer.exit_code, answer.output) == (code, text)


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    refused(
        call(tmp_path / "none"),
        f"{tmp_path / 'none'} is no run directory\n"
        "  hint: `servanda check CONTRACT --run-dir RUN_DIR` measures one; of a trainer's good "
        "run: --save-reference FILE\n",
    )
    assert not (tmp_path / "none").exists()


def test_a_run_of_few_groups_is_refused_with_their_number(tmp_path):
    run_dir, _ = good(tmp_path, last=32, more="", slices="")
    refused(
        call(run_dir),
        f"the run has 32 prompt groups of 'workload', and limits are calibrated on {FEWEST} or "
        "more\n  hint: raise promotion.offline.prompt_groups and go on with the same run "
        "directory: servanda check CONTRACT --run-dir RUN_DIR\n",
    )


@pytest.mark.slow
def test_a_slice_that_few_groups_meet_keeps_its_limit(tmp_path):
    labels = {text: {"first": "c" if text == "c" else "a"} for text in "abcd"}
    rare = [*"abd"] * 10 + ["c"]
    run_dir, _ = good(tmp_path, prompts=rare, labels=labels, last=320)
    output = call(run_dir).output
    assert re.search(
        r"^tv: left as it is: \d+ prompt groups of the run met slice 'first=c', and a limit is "
        rf"calibrated on {FEWEST} or more: measure more, or give that slice a clause of its own$",
        output,
        re.M,
    )


def test_a_kernel_with_a_fault_on_purpose_is_no_pair_to_keep(tmp_path):
    run_dir, _ = good(tmp_path, infer=", fault: {undisclosed_temperature: 0.9}", last=96)
    refused(
        call(run_dir),
        "the infer kernel of this run has a fault on purpose (undisclosed_temperature): that is no "
        "pair to keep\n  hint: take kernels.infer.fault out, and measure\n",
    )


class Undisclosed(TableEngine):
    """It draws colder than it reports."""

    def _draw(self, logp_SV, uniform_S):
        return super()._draw(logp_SV * 3, uniform_S)


@pytest.mark.slow
def test_a_run_whose_guard_is_violated_is_refused(tmp_path):
    run_dir, _ = good(tmp_path, open=lambda kernel, _: Undisclosed(kernel), more="", slices="")
    answer = call(run_dir)
    assert answer.exit_code == 4
    assert answer.output.startswith(
        "'sampler_fidelity' on slice 'all' is violated, so the numbers of this run are not what "
        "they claim (served tokens do not follow the reported distribution"
    )
    assert answer.output.endswith("  hint: repair what it says, and measure with --fresh\n")


@pytest.mark.parametrize("power", ["0", "1", "90"])
def test_a_power_that_is_no_probability_is_a_wrong_call(done, power):
    answer = call(done[0] / "run", "--power", power)
    assert answer.exit_code == 2
    assert f"--power is a probability between 0 and 1, found {power}" in answer.output


def test_a_file_that_is_there_is_not_written_over(done):
    folder, path, new, _ = done
    answer = call(folder / "run", "--save-contract", path)
    assert answer.exit_code == 2
    assert answer.output == f"{path} is there already\n  hint: give another name, or --force\n"
    assert call(folder / "run", "--save-contract", new, "--force").exit_code == 0
    assert "no folder" in call(folder / "run", "--save-contract", folder / "none" / "x.yaml").output


def test_a_contract_that_is_gone_is_asked_for(tmp_path):
    run_dir, path = good(tmp_path, more="", slices="", last=64)
    there = path.rename(tmp_path / "there.yaml")
    refused(
        call(run_dir),
        f"{run_dir} was measured for {path}, which is not there from here\n"
        "  hint: go to the folder that `servanda check` was called in, or name it: "
        "--contract FILE\n",
    )
    assert call(run_dir, "--contract", there).exit_code == 0


def test_a_run_that_keeps_no_text_asks_for_it(tmp_path):
    path, _ = kit.write(tmp_path, q=PAIR, first=64, last=64, limit=0.5)
    run.check(sv.load(path), run_dir=tmp_path / "run", open=run.in_process)
    refused(
        call(tmp_path / "run"),
        f"{tmp_path / 'run'} keeps no text of its contract\n  hint: name it: --contract FILE\n",
    )
    assert call(tmp_path / "run", "--contract", path).exit_code == 0


@pytest.mark.slow
def test_a_percentile_of_the_chain_gets_a_limit(tmp_path):
    budget = "  - {id: budget, metric: ratio_budget, aggregate: p90, at_most: 0.9}\n"
    more = f"{budget}gradient: {{clip_range: [0.2, 0.28], ratio: bypass}}\n"
    run_dir, _ = good(tmp_path, more=more, slices="")

    answer = call(run_dir)

    assert answer.exit_code == 0, answer.output
    # the largest log ratio there is, log(.28 / .25) down, as a share of -log(1 - .2)
    assert re.search(r"^budget: .* 0\.508 +0 +0\.9 +0\.51 +1\.00 +sampling$", answer.output, re.M)


@pytest.mark.slow
def test_what_rounding_reads_as_is_said_to_be_unknown(tmp_path):
    support = "  - {id: support, metric: support_mass, at_most: 0.9}\n"
    answer = call(good(tmp_path, more=support, slices="")[0])
    told = "support: the effect of rounding to float64 on this metric is not known"
    assert told in answer.output.split("\n")


def test_a_percentile_that_the_size_cannot_show_says_how_many_groups_would(tmp_path):
    tail = "  - {id: tail, metric: abs_log_ratio_nats, aggregate: p99, at_most: 0.5, mode: monitor}"
    run_dir, _ = good(tmp_path, more=tail, slices="", last=96)

    output = call(run_dir).output

    told = re.search(
        r"^tail: left as it is: p99 on slice 'all' takes about ([\d,]+) prompt groups like these "
        r"even of identical kernels, and a run has 96: raise promotion\.offline\.prompt_groups$",
        output,
        re.M,
    )
    # log(1/alpha) / -log(.99), were every answer of full length
    assert told and int(told[1].replace(",", "")) > 300


def test_records_that_are_gone_are_said_to_be_damaged(tmp_path):
    run_dir, _ = good(tmp_path, more="", slices="", last=96)
    first = min(run_dir.rglob("*000000.infer.parquet"))
    first.unlink()
    refused(
        call(run_dir),
        f"{run_dir / 'attempt-1'} has the records of 0 prompt groups, and its verdict counted 96: "
        "a file of a round is lost or damaged\n"
        "  hint: the same `servanda check` measures it again, with the same draws\n",
    )


def test_a_contract_that_was_edited_since_and_other_prompts_are_refused(tmp_path):
    run_dir, path = good(tmp_path, more="", slices="", last=64)
    text = path.read_text()
    path.write_text(f"# a comment is no other contract\n{text}")
    new = tmp_path / "new.yaml"
    assert call(run_dir, "--save-contract", new).exit_code == 0
    assert new.read_text().startswith("# a comment is no other contract")
    other = tmp_path / "other.yaml"
    for file, words in ((other, ("--contract", other)), (path, ())):
        file.write_text(text.replace("at_most: 0.5", "at_most: 0.4"))
        answer = call(run_dir, *words)
        assert answer.exit_code == 4
        assert f"{file} is not the contract of this run: its digest is " in answer.output
    assert "  hint: it changed since: restore it, measure again with --fresh, or " in answer.output
    path.write_text(text)
    with (tmp_path / "prompts.jsonl").open("a") as prompts:
        prompts.write('{"prompt": "d", "labels": {"first": "d"}}\n')
    refused(
        call(run_dir),
        f"the prompts or golden texts of {path} changed since {run_dir} was measured\n"
        "  hint: restore them, or measure again with --fresh\n",
    )


@pytest.mark.slow
def test_a_budget_that_grows_and_a_run_that_was_violated_are_warned_of(tmp_path):
    more = "  - {id: reward, metric: reward_drift, at_most: 0.01}\nreward: {range: [0, 1]}\n"
    run_dir, _ = good(tmp_path, q=WORSE, more=more, slices="", last=1200)
    new = tmp_path / "new.kernelcontract.yaml"
    answer = call(run_dir, "--save-contract", new)
    assert answer.exit_code == 0, answer.output
    limit = sv.load(new).statistical[1].at_most
    assert limit > 0.01
    assert (
        f"warning: reward: a reward_drift of {limit:g} is more than the budget of 0.01 that the "
        "contract certified; what it gives as the reason for that number does not hold for this "
        "one"
    ) in answer.output.split("\n")
    assert (
        "warning: this run's verdict was violated (reward on all): the limits are those of a pair "
        "that broke its contract"
    ) in answer.output.split("\n")
    lines = new.read_text().split("\n")
    at = next(i for i, line in enumerate(lines) if "id: reward" in line)
    assert lines[at - 1] == "  # calibrated: was 0.01"
    assert len(json.loads(call(run_dir, "--format", "json").stdout)["warnings"]) == 2


@pytest.mark.slow
def test_groups_that_few_carry_are_warned_of(tmp_path):
    """Two in a hundred prompts drift, and all the rest is bit for bit the same."""
    labels = {text: {"first": text} for text in "acd"}
    run_dir, _ = good(
        tmp_path,
        p={"": [0.0, 0.5, 0.0, 0.0, 0.5], "d": [0.0, 0.5, 0.0, 0.0, 0.5]},
        q={"": [0.0, 0.5, 0.0, 0.0, 0.5], "d": [0.0, 0.8, 0.0, 0.0, 0.2]},
        prompts=[*"a" * 98, *"dd"],
        labels=labels,
        more="",
        slices="",
    )
    output = call(run_dir).output
    assert re.search(
        r"^warning: tv: 5 % of the prompt groups carry \d+ % of its mean on slice 'all': for such "
        r"groups the stated power is too good$",
        output,
        re.M,
    )
    assert "warning" not in call(good(tmp_path / "even", more="", slices="")[0]).output
