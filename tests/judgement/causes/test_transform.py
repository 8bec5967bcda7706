# The sampler's setting that one side alone applies: named where it makes the difference.

import re
from dataclasses import replace

import numpy as np
import pytest

from servanda.judgement.causes.gap_cause import explain
from servanda.judgement.causes.gap_shape import SETTINGS, accounts
from servanda.judgement.causes.slice_search import halves
from servanda.judgement.causes.token_table import TokenTable
from servanda.traces.trace import pair
from tests.field.rows import servanda
from tests.field.worlds import draw, run

LIMIT = 0.01


def table_of(drawn):
    """The tokens of some drawn steps."""
    return TokenTable.of(
        (
            d.step,
            pair(d.train.astype(float), d.infer.astype(float), d.mask, tokens=d.token),
            [""] * len(d.token),
        )
        for d in drawn
    )


def setting_of(table):
    found = explain(table, LIMIT)
    cause = found.evidence if found.cause in SETTINGS else ""
    return cause, [float(number) for number in re.findall(r"\d+(?:\.\d+)?", cause)]


def told(steps=range(1, 7), **how):
    """The setting that explains drawn steps, and the numbers in it."""
    return setting_of(table_of(draw(7, step, **how) for step in steps))


@pytest.mark.parametrize("temperature", [0.9, 0.95, 1.1])
def test_a_temperature_of_the_engine_alone_is_named_with_its_value(temperature):
    cause, numbers = told(temperature=temperature)
    assert cause.startswith("the engine's is about ")
    assert numbers[0] == pytest.approx(temperature, abs=0.011)


def test_the_ratio_of_two_temperatures_is_what_counts():
    """The trainer and the engine both at .7 differ in nothing."""
    assert told(temperature=0.7, scaled=True) == ("", [])


@pytest.mark.parametrize("top_p", [0.8, 0.9, 0.95])
def test_a_cut_is_named_with_the_mass_it_takes(top_p):
    cause, numbers = told(top_p=top_p)

    mass = [
        1 - np.exp(draw(7, s, top_p=top_p).train - draw(7, s, top_p=top_p).infer) for s in (1, 2)
    ]
    assert cause.startswith("the engine cannot sample ")
    assert numbers[0] == pytest.approx(100 * np.mean(mass), rel=0.05)
    assert top_p - 0.005 <= numbers[1] <= top_p + 0.06  # no more than was cut, and near it
    assert numbers[-1] > 90


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.1, 0.5, 1.5, 3.0, 5.0])
def test_noise_of_any_size_is_no_setting(noise):
    assert told(noise=noise)[0] == ""


@pytest.mark.sampled(3)
@pytest.mark.parametrize("noise", [1.5, 3.0, 5.0])
def test_heavy_tails_at_few_tokens_are_no_cut(noise):
    """The mean weight is 1, and 1,152 tokens have yet to meet the weights that make it so."""
    for seed in range(1, 21):
        assert told(range(seed, seed + 1), noise=noise, size=12)[0] == ""


def test_a_temperature_under_larger_noise_is_not_named():
    """It would explain the less: the answer is that nothing is known."""
    assert told(temperature=0.95, noise=0.5)[0] == ""


def test_one_kind_of_prompt_at_another_temperature_is_not_the_setting_of_all():
    drawn = [
        draw(8, step, temperature=temperature, size=size)
        for step in range(1, 13)
        for temperature, size in ((0.8, 4), (1.0, 20))
    ]
    found = explain(table_of(drawn), LIMIT)
    assert found.cause == "temperature" and "in row below 4" in found.text


@pytest.mark.parametrize("temperatures", [(0.7, 1.3), (0.8, 1.0)])
def test_temperatures_by_sequence_do_not_cancel(temperatures):
    rng = np.random.default_rng(0)
    drawn = [
        draw(8, step, temperature=float(temperatures[k]), size=1)
        for step in range(1, 161)
        for k in (rng.integers(0, 2),)
    ]
    drawn = [replace(d, step=1 + i // 40) for i, d in enumerate(drawn)]
    found = explain(table_of(drawn), LIMIT)
    assert found.cause == "temperature", found.text
    assert "it differs by sequence" in found.text or "in a few sequences" in found.text


@pytest.mark.parametrize(("temperature", "named"), [(0.9, True), (0.98, False), (1.0, False)])
def test_a_dump_names_it_where_the_verdict_asks_for_a_cause(temperature, named, tmp_path):
    """At .98 the dump holds, and no one looks for a cause."""
    run(tmp_path / "dump", lambda step: draw(9, step, temperature=temperature), range(1, 7))
    done = servanda("check", tmp_path / "dump", "--quiet")

    assert done.exit == (1 if named else 0)
    words = "that one side alone applies; the engine's is about 0.90"
    assert (words in done.text) == named


def test_tokens_that_the_trainer_cannot_draw_break_nothing():
    table = table_of(draw(7, step, temperature=0.8) for step in range(1, 4))
    table.train_K[::50] = -np.inf
    chosen_K, tested_K = halves(table)
    found = accounts(table.taken(chosen_K), table.taken(tested_K), 0.0, SETTINGS)
    assert found and all(0 <= one.share <= 1 and np.isfinite(one.left) for one in found)
