# Derive: from budgets to contracts that lint clean, and every budget that is refused.

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from servanda.authoring.derive.budget import Request
from servanda.authoring.derive.derivation import derive
from servanda.authoring.derive.sizes import Requirement
from servanda.contract.model import Kernel
from servanda.contract.objective import GroupAdvantage, Weighting
from servanda.errors import ContractError
from servanda.judgement import plan as planning
from servanda.judgement.bound_chain.chain import chain
from servanda.runner import load, run
from servanda.theory.bounds.sequence import sequence_tv_from_osc, sequence_tv_from_token_tv
from servanda.theory.stats.interval import units_expected
from tests import kit
from tests.drawn import examples
from tests.kit import servanda


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two tables, prompts and golden texts."""
    place = tmp_path_factory.mktemp("derive")
    kit.write(place, q={"": kit.moved(kit.BASE, 0.01)})
    kit.golden(place)
    bf16 = json.loads((place / "q.json").read_text()) | {"capture": "bfloat16"}
    (place / "coarse.json").write_text(json.dumps(bf16))
    return place


def call(folder, *more, infer="q.json", tokens=6, golden=True):
    texts = ["--golden", folder / "golden.jsonl"] if golden else []
    return servanda(
        "contract",
        "derive",
        *("--train", f"table:{folder / 'p.json'}", "--infer", f"table:{folder / infer}"),
        *("--prompts", folder / "prompts.jsonl", *texts, "--max-new-tokens", tokens),
        *more,
    )


def refused(folder, *more, **kept):
    done = call(folder, *more, **kept)
    assert done.exit_code == 2
    return " ".join(done.output.split())


def asked(folder, **budgets):
    """What the command line would ask, of tables."""
    train, infer = (Kernel(engine="table", model=name) for name in ("p.json", "q.json"))
    more = {"tokens": 6, "golden": "golden.jsonl"} | budgets
    return Request("derived", train, infer, "prompts.jsonl", **more)


def read(folder, text):
    contract = load.read(text.encode(), "derived.yaml", folder)
    # what lint would find with the texts at hand: sizes that cannot certify a limit
    planning.make_plan(contract, *load.corpora(contract))
    return contract


# what is written


BUDGETS = st.fixed_dictionaries(
    {
        "tokens": st.sampled_from([1, 6, 100, 3000]),
        "claim": st.sampled_from(["population", "realised"]),
    },
    optional={
        "reward": st.tuples(st.floats(0.002, 0.9), st.sampled_from([(0.0, 1.0), (-1.0, 3.0)])),
        "loss": st.sampled_from(["token_mean", "sequence_sum", "sequence_mean"]),
        "bias": st.tuples(st.floats(0.005, 0.5), st.sampled_from(["naive", "tis", "mis", "clip"])),
        "ratio": st.tuples(st.floats(0.01, 0.99), st.floats(0.05, 0.5), st.floats(0.05, 0.5)),
        "golden": st.none(),
    },
)


@pytest.mark.slow
@settings(max_examples=examples(60))
@given(budgets=BUDGETS)
def test_whatever_is_derived_lints_clean(folder, budgets):
    weightings = {
        "naive": None,
        "tis": Weighting(tis=2.0),
        "mis": Weighting(mis=(0.5, 2.0)),
        "clip": Weighting(clip=0.2),
    }
    given_ = {key: budgets[key] for key in ("tokens", "claim", "golden") if key in budgets}
    if "reward" in budgets:
        share, (low, high) = budgets["reward"]
        given_ |= {"reward_drift": share * (high - low), "reward_range": (low, high)}
    if "bias" in budgets:
        bias, name = budgets["bias"]
        group = GroupAdvantage(group_size=8)
        given_ |= {"bias": bias, "advantage": group, "score_norm": "logit_space"}
        given_ |= {"weighting": weightings[name], "loss": budgets.get("loss", "token_mean")}
    if "ratio" in budgets:
        share, low, high = budgets["ratio"]
        given_ |= {"ratio_share": share, "clip_range": (low, high)}
    try:
        found = derive(asked(folder, capture="float64", **given_))
    except ContractError as error:
        assert not {"reward", "bias", "ratio"} & budgets.keys() or "no run of" in str(error)
        return
    contract = read(folder, found.text)
    enforced = {clause.metric: clause for clause in contract.statistical if clause.enforced}
    wanted = {"reward": "reward_drift", "bias": "policy_gradient_bias", "ratio": "ratio_budget"}
    assert {*enforced} == {metric for key, metric in wanted.items() if key in budgets}
    if "reward" in budgets:
        assert enforced["reward_drift"].at_most == given_["reward_drift"]
    comments = [line for line in found.text.split("\n") if line.lstrip().startswith("#")]
    assert max(map(len, comments)) <= 100


@pytest.mark.slow
@settings(max_examples=examples(40))
@given(share=st.floats(0.01, 0.9), tokens=st.integers(1, 2000))
def test_what_would_suffice_does(folder, share, tokens):
    """Every monitored limit, put into its theorem, leads to no more than the budget."""
    found = derive(asked(folder, reward_drift=share, tokens=tokens, capture="float64"))
    contract = read(folder, found.text)
    limits = {clause.id: clause.at_most for _, _, clause in contract.clauses()}
    assert float(sequence_tv_from_token_tv(limits["tv"], tokens)) <= share
    assert float(sequence_tv_from_osc(limits["drift"], tokens)) <= share
    assert limits["tv"] > 0.99 * share / tokens
    ends = [s for s in chain(contract).steps if s.what == "drift of any reward in [0, 1]"]
    starts = {step.clause: step.number for step in ends}
    for clause in ("reward", "tv", "drift"):
        assert starts[clause] <= share * (1 + 1e-12)


def test_a_contract_says_why_each_limit_is_what_it_is(folder):
    text = call(folder, "--reward-drift", 0.05).stdout
    flat = " ".join(text.replace("#", " ").split())
    for reason in (
        "The budget itself: no reward in [0, 1] has an expectation that differs by more than 0.05.",
        "(reward_drift_from_tv). Assumes: sampler, order, same_tokens, independent, reward_range, "
        "same_reward.",
        "monitored: none is needed to keep the budget, so none fails the contract",
        "p99 looks at all but 1 %, so it does not suffice.",
        "Would suffice: 0.05 over 6 tokens, the union bound (sequence_tv_from_token_tv).",
        "Would suffice if it were so at every context, and not only at golden ones",
        "(osc_for_reward_drift, answers of 6 tokens). Assumes: same_filters, every_context.",
        "Nine of ten runs of a kernel at half of its budget are decided after about 1,728.",
    ):
        assert reason in flat, reason
    # 6 tokens, half of them used: 5,000 for the guard at the first look
    assert "prompt_groups: [1728, 1728]" in text
    long = derive(asked(folder, reward_drift=0.05, tokens=24, capture="float64"))
    assert long.offline == (448, 1216)


def test_a_file_finds_its_texts_and_kernels_from_where_it_lies(folder, tmp_path):
    file = tmp_path / "limits.kernelcontract.yaml"
    done = call(folder, "--reward-drift", 0.05, "-o", file)
    assert done.exit_code == 0
    assert f"wrote      {file}\n" in done.output
    assert "enforced   reward: the drift of any reward at most 0.05\n" in done.output
    assert "monitored  tv: the mean TV of a token at most 0.00833\n" in done.output
    assert "none of them is needed to keep a budget: they warn, and fail nothing" in done.output
    assert "takes      about 1,728 prompt groups for a kernel at half the budget" in done.output
    assert run.load(file).metadata.name == "limits"
    assert servanda("contract", "lint", file).exit_code == 0
    assert call(folder, "--reward-drift", 0.05, "-o", file).exit_code == 2
    assert call(folder, "--reward-drift", 0.04, "-o", file, "--force").exit_code == 0


@pytest.mark.slow
def test_a_derived_contract_decides(folder, tmp_path):
    file = folder / "decides.kernelcontract.yaml"
    assert call(folder, "--reward-drift", 0.2, "-o", file).exit_code == 0
    verdict = run.check(file, run_dir=tmp_path / "good", open=run.in_process)
    assert verdict.outcome == "holds"
    (folder / "q.json").rename(folder / "kept.json")
    try:
        kit.table(folder, "q.json", {"": kit.moved(kit.BASE, 0.2)})
        verdict = run.check(file, run_dir=tmp_path / "bad", open=run.in_process)
    finally:
        (folder / "kept.json").replace(folder / "q.json")
    assert verdict.outcome == "violated"


def test_a_gradient_and_a_clip_range_are_declared_as_they_were_given(folder):
    text = call(
        folder,
        *("--policy-gradient-bias", 0.1, "--group-size", 8, "--score-norm", "logit_space"),
        *("--weighting", "mis=0.5,2", "--clip-range", 0.2, 0.28, "--ratio-share", 0.25),
    ).stdout
    declared = (
        "gradient: {advantage: {group_size: 8}, score_norm: logit_space, "
        "weighting: {mis: [0.5, 2]}, loss: token_mean, clip_range: [0.2, 0.28], ratio: bypass}"
    )
    assert declared in text
    assert "{id: bias, metric: policy_gradient_bias, at_most: 0.1, slices: [all]}" in text
    assert "{id: ratio, metric: ratio_budget, aggregate: p99, at_most: 0.25," in text
    assert "score_norm, token_level, constant_divisor." in " ".join(text.replace("#", "").split())
    # the weighting leaves weights up to 2 alone, the clip range less
    assert re.search(r"id: tail-gradient.* at_most: 0\.693,", text)
    assert re.search(r"id: tail-ratio.* at_most: 0\.0557,", text)
    assert re.search(r"id: drift, metric: logit_osc_nats.* at_most: 0\.0557,", text)


@pytest.mark.parametrize("loss", ["sequence_sum", "sequence_mean"])
def test_a_loss_of_whole_answers_is_sized_by_answers(folder, loss):
    bias = ("--policy-gradient-bias", 0.5, "--advantage", 1, "--score-norm", 1)
    done = call(folder, *bias, "--loss", loss)
    assert f"weighting: naive, loss: {loss}}}" in done.stdout
    # half the gap over each of 6 tokens
    assert re.search(r"id: tv-gradient.* at_most: 0\.0416,", done.stdout)
    read(Path(), done.stdout)
    assert "--loss: without --policy-gradient-bias" in refused(folder, "--loss", loss)


def test_a_reward_of_your_own_takes_the_place_of_every_reward(folder):
    (folder / "rewards.py").write_text("def score(prompt, answer):\n    return 1.0\n")
    of = f"{folder / 'rewards.py'}:score"
    done = call(folder, "--reward-drift", 0.1, "--reward-gap", of, tokens=8192)
    assert re.search(r'reward: {range: \[0, 1\], of: ".*/rewards\.py:score"}', done.stdout)
    assert "metric: reward_gap, at_most: 0.1, slices: [all]" in done.stdout
    assert "mode: monitor" not in done.stdout
    assert "left out   the logits' drift: no drift of logits suffices" in done.stderr
    read(Path(), done.stdout)  # printed, it names its files from here
    groups = re.search(r"at most ([0-9,]+),\s+which is ([0-9,]+) new tokens", done.stderr)
    most, tokens = (int(number.replace(",", "")) for number in groups.groups())
    assert tokens == 2 * 8192 * most  # train answers, too
    lines = [json.dumps({"prompt": text, "answer": "a"}) for text in "abc"]
    (folder / "answered.jsonl").write_text("\n".join(lines))
    prompts = ("--prompts", folder / "answered.jsonl")
    named = call(folder, "--reward-drift", 0.1, "--reward-gap", "exact_answer", *prompts).stdout
    assert 'of: "exact_answer"}' in named
    text = refused(folder, "--reward-drift", 0.1, "--reward-gap", "exact_answr")
    assert "no reward is named 'exact_answr'" in text


def test_sizes_are_those_of_the_certificate():
    expected = Requirement(0.05).units(alpha=0.025, cells=2)
    holds, violated = units_expected(0.05, 0.025, 0.025), units_expected(0.05, 0.1, 0.025, 2)
    assert expected == pytest.approx(max(holds, violated), rel=0.02)
    # each of two ends has half of alpha
    both = Requirement(0.05, sides=2).units(alpha=0.05, cells=2)
    assert both == expected
    # groups that are hardly filled say less, and weights near 1 say more
    assert Requirement(0.05).units(alpha=0.025, cells=2, fill=0.1) > expected
    near = Requirement.of(0.05, (-1.0, 1.0), "token", 0.1)
    assert near.units(alpha=0.025, cells=2) < Requirement(near.limit, near.best).units(
        alpha=0.025, cells=2
    )
    # half of the limit is u errors sqrt(v / n) away, and u^2 / 2 - 1.28 u = log(cells / alpha)
    scattered = Requirement(0.05, sides=2, variance=0.5).units(alpha=0.05, cells=3)
    errors = 0.025 * math.sqrt(scattered / 0.5)
    assert errors**2 / 2 - 1.2816 * errors == pytest.approx(math.log(3 / 0.025), rel=1e-4)


# what is refused


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("arguments", "reason", "next_move"),
    [
        ((), "no budget is given: there is nothing to derive", "give --reward-drift 0.05"),
        (
            ("--reward-drift", 0),
            "a reward drift of 0 is no budget: no sample can show that two kernels are the same",
            "give a number above 0",
        ),
        (
            ("--reward-drift", "nan"),
            "a reward drift of nan is no budget: it is not a number",
            "give a number above 0",
        ),
        (
            ("--reward-drift", "inf"),
            "a reward drift of inf is no budget: nothing can exceed it",
            "give a number above 0",
        ),
        (
            ("--reward-drift", -1),
            "a reward drift of -1 is no budget: what it limits is never negative",
            "give a number above 0",
        ),
        (
            ("--reward-drift", 1),
            "no reward in [0, 1] can drift by more than 1: a budget of 1 can never fail",
            "give a budget below 1, or the reward's own --reward-range",
        ),
        (
            ("--reward-drift", 1, "--reward-range", 1, 0),
            "the range of the reward, [1, 0], is empty or endless",
            "give --reward-range LOW HIGH",
        ),
        (
            ("--reward-drift", 1e-5),
            "no run of 100,000 prompt groups can certify reward_drift at most 1e-05: a kernel at "
            "half of it would take about 3,",
            "100,000 decide a budget of 0.00035; --most 3460000 gives a run that is long enough",
        ),
        (
            ("--reward-drift", 0.001, "--most", 64),
            "no run of 64 prompt groups can certify reward_drift at most 0.001",
            "hint: no budget is decided by 64; --most 62000",
        ),
        (
            (
                *("--policy-gradient-bias", 0.1, "--advantage", 1, "--score-norm", 1),
                *("--weighting", "mis=2,0.5"),
            ),
            "the band of mis is empty: 2 is not below 0.5",
            "write LOW,HIGH around 1, such as --weighting mis=0.5,2",
        ),
        (
            ("--ratio-share", 0.25, "--clip-range", 0.2, "nan"),
            "a clip range of [0.2, nan] is none: both are numbers",
            "give both distances from 1",
        ),
        (
            ("--reward-drift", 0.1, "--reward-gap", "exact_answer"),
            "--reward-gap exact_answer reads the 'answer' of each line, and",
            "give --prompts a file whose lines all have one, or --reward-gap FILE.py:FUNCTION",
        ),
        (
            ("--reward-drift", 0.1, "--reward-gap", "nope.py:score"),
            "--reward-gap: there is no file nope.py",
            "name FILE.py:FUNCTION from where you are",
        ),
        (
            ("--policy-gradient-bias", 0.1),
            "something is not declared: the largest advantage (--advantage 1, or --group-size 8 "
            "for GRPO); the largest norm of grad log p",
            "Servanda measures neither: both are declared",
        ),
        (
            ("--policy-gradient-bias", 0.1, "--advantage", 1),
            "something is not declared: the largest norm of grad log p (--score-norm 5, or "
            "logit_space)",
            "both are declared",
        ),
        (
            ("--policy-gradient-bias", 8, "--advantage", 1, "--score-norm", 1),
            "no bias exceeds 2: a budget of 8 can never fail",
            "give a budget below 2",
        ),
        (
            ("--policy-gradient-bias", 8, "--advantage", -1, "--score-norm", 1),
            "an advantage times a score norm of -1 bounds nothing",
            "both are finite, and above 0",
        ),
        (
            ("--ratio-share", 0.25),
            "a share of a clip range needs both: the range and the share",
            "give --clip-range 0.2 0.28 --ratio-share 0.25",
        ),
        (
            ("--ratio-share", 0.25, "--clip-range", 0, 0.2),
            "a clip range of [0, 0.2] has no width on one side",
            "give both distances from 1",
        ),
        (
            ("--ratio-share", 1.5, "--clip-range", 0.2, 0.2),
            "a share of 1.5 leaves the policy's own update nothing",
            "give a share below 1",
        ),
        (
            ("--reward-gap", "exact_answer", "--ratio-share", 0.5, "--clip-range", 0.2, 0.2),
            "--reward-gap says how a budget is held, and none is given",
            "give --reward-drift",
        ),
        (
            ("--policy-gradient-bias", 1, "--weighting", "is"),
            "no weighting is named 'is'",
            "importance weights have no largest value, so no sample bounds them: tis=2",
        ),
        (
            ("--reward-drift", 0.1, "--weighting", "tis=2", "--group-size", 8),
            "--group-size, --weighting: without --policy-gradient-bias nothing here is made of it",
            "give --policy-gradient-bias B, or leave it out",
        ),
        (
            ("--policy-gradient-bias", 1, "--weighting", "naive=3"),
            "naive corrects nothing and takes no value: 'naive=3'",
            "",
        ),
        (("--policy-gradient-bias", 1, "--weighting", ""), "no weighting is named ''", "tis"),
        (
            ("--policy-gradient-bias", 1, "--weighting", "tos=2"),
            "no weighting is named 'tos'",
            "did you mean 'tis'?",
        ),
        (
            ("--policy-gradient-bias", 1, "--weighting", "mis=2"),
            "'mis=2' is no weighting",
            "write mis=0.5,2",
        ),
        (
            ("--policy-gradient-bias", 1, "--score-norm", "big"),
            "--score-norm is a number, or logit_space: 'big'",
            "",
        ),
        (
            ("--policy-gradient-bias", 1, "--advantage", 1, "--group-size", 8),
            "--advantage and --group-size say the same thing",
            "give one",
        ),
    ],
)
def test_a_budget_that_is_none_says_why_and_what_to_do(folder, arguments, reason, next_move):
    text = refused(folder, *arguments)
    assert reason in text
    assert next_move in text


@pytest.mark.slow
@pytest.mark.parametrize(
    "budget",
    [
        ("--reward-drift", 0.0002),
        ("--reward-drift", 0.0002, "--claim", "realised"),
        ("--policy-gradient-bias", 0.0001, "--advantage", 1, "--score-norm", 1),
    ],
)
@pytest.mark.parametrize("most", [64, 3000])
def test_the_budget_that_is_offered_is_one(folder, budget, most):
    text = refused(folder, *budget, "--most", most)
    offered = re.search(r"decide a budget of ([0-9.e-]+);", text)
    if offered is None:
        assert f"no budget is decided by {most:,}" in text
        return
    assert float(offered[1]) < 2
    again = call(folder, budget[0], float(offered[1]), *budget[2:], "--most", most)
    assert again.exit_code == 0, again.output


def test_no_problem_points_into_a_text_that_nobody_has_seen(folder, monkeypatch):
    def refuse(contract, *_):
        raise ContractError("a cell is out of reach", where=contract.where("confidence"))

    monkeypatch.setattr(planning, "make_plan", refuse)
    text = refused(folder, "--reward-drift", 0.1)
    assert text.startswith(
        "a cell is out of reach hint: servanda contract lint would refuse this contract"
    )


def test_a_budget_under_the_precision_of_the_record_is_refused(folder):
    text = refused(folder, "--reward-drift", 0.02, infer="coarse.json")
    assert (
        "a reward drift of 0.02 lies under the precision of the record: logprobs in bfloat16 are "
        "off by up to 7.8e-03 nats (tokens of about 3 nats), which alone may read as 0.047" in text
    )
    assert "hint: let the engines record float32, or give a budget above 0.047" in text
    assert call(folder, "--reward-drift", 0.1, infer="coarse.json").exit_code == 0
    text = refused(folder, "--ratio-share", 0.01, "--clip-range", 0.2, 0.2, infer="coarse.json")
    assert "0.01 of the clip range is a log-ratio of 1.8e-03 nats" in text


def rounded(folder, **more):
    """The same question of kernels that round to 16 bits."""
    found = asked(folder, reward_drift=0.02, capture="float64", **more)
    infer = found.infer.model_copy(update={"engine": "transformers", "dtype": "bfloat16"})
    return replace(found, infer=infer)


def test_a_horizon_at_which_the_chain_says_nothing_offers_the_reward_itself(folder):
    with pytest.raises(ContractError) as error:
        derive(rounded(folder, tokens=8192))
    text = str(error.value)
    for part in (
        "over answers of up to 8,192 tokens a reward drift of 0.02 takes a mean |dlogp| of about "
        "0.0004 nats a token (or logits within 0.0009 at every context)",
        "and that lies below what dense 16-bit stacks show. Two public figures, of two different "
        "stacks: a mean |dlogp| of 0.011 nats (Qwen3-4B, vLLM against Megatron, "
        "vllm-project/vime#64); and a KL of 0.00064 nats a token (Qwen3-8B, SGLang against "
        "Megatron, arXiv 2510.11370), which over such answers is a TV of about 0.89\n",
        "--reward-gap OF promises your own reward, both kernels sampling",
        "--aligned, for kernels that agree operation by operation (such stacks show 3.24e-05)",
    ):
        assert part in text, part
    assert derive(rounded(folder, tokens=8192, aligned=True)).enforced
    assert derive(rounded(folder, tokens=8192, reward_of="exact_answer")).enforced
    assert derive(rounded(folder, tokens=100)).enforced
    # below what one figure says, and above the other
    assert derive(replace(rounded(folder, tokens=182), reward_drift=0.15)).enforced
    with pytest.raises(ContractError, match=r"TV of about 1: vacuous"):
        derive(rounded(folder, tokens=40_000))


def test_a_drift_of_logits_below_their_rounding_is_left_out_with_the_reason(folder):
    found = derive(rounded(folder, tokens=24))
    assert found.left_out == (
        "the logits' drift: 0.016 nats would suffice (osc_for_reward_drift, answers of 24 "
        "tokens), and rounding logits of 16 to 32 to bfloat16 alone drifts by 0.125 "
        "(osc_from_rounding)",
    )
    assert "# no numerical clauses: 0.016 nats would suffice" in found.text
    assert "golden" not in found.text.split("statistical:")[1]
    without = derive(asked(folder, reward_drift=0.1, golden=None))
    assert without.left_out == ("the logits' drift: no golden texts were given",)


def test_a_share_that_rounding_alone_uses_up_is_refused(folder):
    clip = {"clip_range": (0.2, 0.28), "reward_drift": None}
    with pytest.raises(ContractError) as error:
        derive(replace(rounded(folder, tokens=24), ratio_share=0.01, **clip))
    text = str(error.value)
    assert "0.01 of the clip range is a log-ratio of 2.2e-03 nats, and rounding a single" in text
    assert "between 1 and 2 to bfloat16 moves it by up to 3.9e-03: no such kernel keeps" in text
    assert "promise logit_osc_nats at_most 0 on golden texts" in text
    assert derive(replace(rounded(folder, tokens=24), ratio_share=0.25, **clip)).enforced


def test_a_drift_of_logits_is_named_only_where_it_keeps_every_budget(folder):
    more = {"weighting": Weighting.model_validate({"reject": [0.5, 2.0]}), "bias": 0.1}
    more |= {"advantage": 1.0, "score_norm": 1.0, "clip_range": (0.2, 0.28), "ratio_share": 0.25}
    found = derive(asked(folder, reward_drift=None, **more))
    left_out = ("the logits' drift: no drift of logits suffices for every budget",)
    assert found.left_out == left_out


def test_kernels_and_files_that_are_not_there_are_said_with_their_place(folder, tmp_path):
    done = call(folder, "--reward-drift", 0.1, infer="none.json")
    assert done.exit_code == 2
    done = call(folder, "--reward-drift", 0.1, infer=".")
    assert done.exit_code == 2
    assert "is a folder, and a table is a JSON file\n  hint: give the file" in done.output
    for place, what in ((tmp_path, "is a folder"), (tmp_path / "no" / "x", "cannot be written")):
        done = call(folder, "--reward-drift", 0.1, "-o", place)
        assert done.exit_code == 2
        assert f"{place} {what}" in done.output
    done = call(folder, "--reward-drift", 0.1, infer="none.json")
    assert f"--infer:1:7: there is no {folder / 'none.json'}" in done.output
    done = servanda(
        *("contract", "derive", "--train", "table:x", "--infer", "tabel:y", "--prompts", "z"),
        *("--max-new-tokens", 4),
    )
    assert done.exit_code == 2
