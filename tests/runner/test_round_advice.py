# Advice under a violated contract: its cause, its slice, and a command that tests it.

from dataclasses import replace

import pytest

import servanda as sv
from servanda.judgement.verdict import FORMATS
from servanda.runner import run
from servanda.runner.load import compile
from servanda.runner.round_advice import advised
from tests import kit


def _checked(tmp_path, **how):
    path, _ = kit.write(tmp_path, **how)
    return path, run.check(path, run_dir=tmp_path / "run", open=run.in_process)


def test_a_kernel_that_keeps_its_contract_gets_no_advice(tmp_path):
    _, verdict = _checked(tmp_path, q={"": kit.BASE}, p={"": kit.BASE}, limit=0.3)
    assert (verdict.outcome, verdict.advice) == ("holds", None)
    assert "Likely cause" not in str(verdict)


@pytest.mark.slow
def test_a_label_that_explains_the_gap_is_the_slice_of_every_report(tmp_path):
    _, verdict = _checked(
        tmp_path,
        p={"": kit.BASE, "a": kit.BASE},
        q={"": kit.BASE, "a": kit.moved(kit.BASE, 0.3)},
        prompts=("a",) + ("b",) * 3,
        width=1,
        limit=0.05,
        last=6000,
    )
    advice = verdict.advice
    assert advice.name == "one_kind" and "first a" in advice.cause
    (part,) = advice.slices
    assert 'labels.first: {in: ["a"]}' in part.entry
    assert part.rest.value == 0
    for text in (str(verdict), FORMATS["markdown"](verdict), FORMATS["html"](verdict)):
        assert text.count("Likely cause") == 1 and "found-1" in text
        assert "token TIS at 2" in text


def test_tokens_that_do_not_follow_the_report_are_the_cause_and_no_correction_is_predicted(
    tmp_path,
):
    path, verdict = _checked(
        tmp_path, p={"": kit.BASE}, q={"": kit.BASE}, infer=", fault: {undisclosed_top_p: 0.7}"
    )
    advice = verdict.advice
    assert advice.name == "raw_logprobs" and not advice.corrections
    assert advice.command == f"servanda relations {path} --only sampling"
    assert sv.load(path).kernels.infer.fault == {"undisclosed_top_p": 0.7}


def test_without_sampled_tokens_no_cause_is_named(tmp_path):
    path, verdict = _checked(tmp_path, q={"": kit.moved(kit.BASE, 0.3)}, p={"": kit.BASE})
    again = advised(compile(sv.load(path)), [], replace(verdict, advice=None))
    assert again.advice.cause == "unexplained: no token was sampled that both kernels have scored"
    assert "servanda compare table:" in again.advice.command
    assert not again.advice.corrections
