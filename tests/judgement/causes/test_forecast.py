# Advice: predicted effects against the tokens they are about, and commands that exist.

import dataclasses
import json
import shlex

import numpy as np
import pytest

from servanda.contract.model import Kernel, Kernels
from servanda.judgement.breakdown import Advice
from servanda.judgement.causes.catalogue import CAUSES, REMEDIES, UNEXPLAINED, Sides
from servanda.judgement.causes.forecast import advise
from servanda.judgement.causes.gap_cause import explain
from servanda.report.consequence import advice_lines
from servanda.theory.bounds.sequence import shortfall
from servanda.traces.serialization import from_plain, to_plain
from tests import transcripts
from tests.judgement.causes.gaps import table

REPLICA = {"replica": lambda s: f"r{s % 4}"}
MANY = 10_000_000  # tokens of an update without noise


def _third(row, *_):
    return row % 4 == 3


def _advised(drawn, update_tokens=MANY):
    return advise(drawn, explain(drawn, 0.025), update_tokens)


def _of(advice, name):
    return next(c for c in advice.corrections if c.name == name)


def test_the_numbers_are_those_of_the_tokens():
    drawn = table(3, labels=REPLICA, wrong=_third)
    advice = _advised(drawn)
    replica_K = drawn.labels["replica"][1]
    bad_K = np.array(drawn.labels["replica"][0])[replica_K] == "r3"

    (part,) = advice.slices
    tv_K = shortfall(drawn.log_ratio_K)
    assert part.tokens == pytest.approx(bad_K.mean())
    assert part.rest.value == pytest.approx(tv_K[~bad_K].mean())
    assert part.rest.low < part.rest.value < part.rest.high
    assert advice.before.value == pytest.approx(tv_K.mean())
    w_K = np.exp(drawn.log_ratio_K)
    mask = _of(advice, "icepop")
    assert mask.masked.value == pytest.approx(((w_K < 0.5) | (w_K > 5)).mean())
    assert mask.noise.value == pytest.approx(
        np.sqrt((np.where((w_K < 0.5) | (w_K > 5), 0, w_K) ** 2).mean())
    )
    none = _of(advice, "none")
    # |1 - w| + 1 - w is 2 (1 - w)^+
    assert none.bias.value == pytest.approx(2 * tv_K.mean())
    assert none.noise.value == 1 and none.masked.value == 0


def test_weights_of_tokens_beat_none_where_the_bias_is_larger_than_the_noise():
    drawn = table(3, noise=0.3)
    exact, noisy = _advised(drawn), _advised(drawn, 5)
    assert exact.corrections[0].name in ("tis", "icepop")
    assert _of(exact, "none").error.low > exact.corrections[0].error.high
    lines = "\n".join(advice_lines(exact))
    assert "smallest bound of the error: token TIS at 2" in lines
    assert "do not tell whether a correction lowers the error itself" in lines
    # the noise of 5 tokens is larger than the bias that weights take away
    assert "none lowers the bound of the error by 5 %" in "\n".join(advice_lines(noisy))


def test_sides_that_agree_need_no_correction():
    lines = "\n".join(advice_lines(_advised(table(3, noise=1e-4))))
    assert "none lowers the bound of the error by 5 %: " in lines


@pytest.mark.slow
def test_an_interval_covers_the_mean_of_the_population():
    """At 95 %: 57 of 60 draws on average, and fewer than 51 with probability 0.003."""
    population = table(0, steps=40, size=400, noise=0.3)
    truth = shortfall(population.log_ratio_K).mean()
    covered = 0
    for seed in range(1, 61):
        of = _advised(table(seed, steps=1, size=40, noise=0.3)).before
        covered += of.low <= truth <= of.high
    assert covered >= 51


def test_too_few_prompt_groups_have_no_interval():
    advice = _advised(table(3, steps=1, size=6, noise=0.3))
    assert advice.before.low is None
    assert all(c.error.low is None for c in advice.corrections)
    assert "[" not in "\n".join(advice_lines(dataclasses.replace(advice, slices=())))


def test_advice_survives_json():
    advice = _advised(table(3, labels=REPLICA, wrong=_third))
    assert from_plain(Advice, json.loads(json.dumps(to_plain(advice)))) == advice


def test_every_cause_has_something_to_change_and_a_command_for_two_kernels():
    assert {*REMEDIES} == {*CAUSES}
    local = Kernel(engine="transformers", model="models/tiny-lm")
    server = Kernel(engine="openai_http", url="http://127.0.0.1:8000")
    for name, remedy in REMEDIES.items():
        assert remedy.switch or name == UNEXPLAINED
        for infer in (local, server):
            for contract in ("", "my contract.yaml"):
                command = remedy.test(Sides(Kernels(train=local, infer=infer), contract))
                transcripts.parsed(shlex.split(command))


def test_a_kernel_without_a_string_has_no_command_but_that_of_its_contract():
    of = Kernels(
        train=Kernel(engine="transformers", model="m"),
        infer=Kernel(engine="transformers", model="m", sampling={"temperature": 0.5}),
    )
    for name, remedy in REMEDIES.items():
        command = remedy.test(Sides(of, "c.yaml"))
        assert command == "" or "c.yaml" in command or "preflight" in command, name
        assert "relations" not in remedy.test(Sides(of))


def test_lines_name_each_part_once_and_leave_out_what_is_missing():
    assert [*advice_lines(None)] == []
    assert [*advice_lines(Advice("", "a jump", command="servanda demo"))] == [
        "Likely cause   a jump",
        "Next command   servanda demo",
    ]
    heads = [text[:15].strip() for text in advice_lines(_advised(table(3, wrong=_third)))]
    assert heads[:5] == ["Likely cause", "Slice", "Next command", "Change", "Correction"]
    assert not any(heads[5:])
