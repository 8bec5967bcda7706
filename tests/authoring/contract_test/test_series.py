# Series: what a line of text means, against draws that are made by hand.

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic_core import PydanticCustomError

from servanda.authoring.contract_test.series import DRAWS, MOST_GROUPS, Chance, parse


def shown(text, n=None, seed=0, tokens=1):
    """The values of a series, `tokens` to a prompt group."""
    series = parse(text)
    group_N = np.repeat(np.arange(len(series) if n is None else n), tokens)
    random = np.random.default_rng(seed)
    chance = Chance(random.standard_normal(len(group_N)), random.random(len(group_N)))
    return series.values(group_N, chance)


def test_values_counts_and_lost_tokens_follow_one_another():
    found = shown("0.5x2 0x1 -0.25 _x2 1x3 -inf")
    assert len(parse("0.5x2 0x1 -0.25 _x2 1x3 -inf")) == 10
    assert found[:4].tolist() == [0.5, 0.5, 0.0, -0.25]
    assert np.isnan(found[4:6]).all()
    assert found[6:].tolist() == [1.0, 1.0, 1.0, -math.inf]


def test_beyond_its_end_a_series_shows_nothing():
    assert np.isnan(shown("0.1x2", n=3)[2])


@pytest.mark.parametrize("text", ["gap(0.3)x1", "spike(0.05, 2)x1"])
def test_what_an_honest_kernel_shows_has_weights_that_average_1(text):
    weights = np.exp(shown(text, tokens=200_000))
    assert weights.mean() == pytest.approx(1, abs=4 * weights.std() / math.sqrt(200_000))


def test_gap_is_a_normal_below_0_by_half_its_variance():
    found = shown("gap(0.2)x1", tokens=100_000)
    assert found.mean() == pytest.approx(-0.02, abs=0.003)
    assert found.std() == pytest.approx(0.2, abs=0.003)


def test_spike_has_its_share_at_its_size_and_the_total_variation_that_follows():
    found = shown("spike(0.1, 2)x1", tokens=100_000)
    assert (found < -1).mean() == pytest.approx(0.1, abs=0.004)
    assert found[found < -1] == pytest.approx(-2)
    tv = np.maximum(1 - np.exp(found), 0).mean()
    assert tv == pytest.approx(0.1 * (1 - math.exp(-2)), abs=0.004)


@pytest.mark.parametrize("limit", [0.03, 0.1, 0.2, 1 / 3])
def test_a_value_written_as_the_limit_does_not_exceed_it(limit):
    assert (np.abs(shown(f"{limit!r}x1 -{limit!r}x1")) <= limit).all()


@given(
    st.lists(st.tuples(st.floats(-5, 5).map(lambda x: round(x, 3)), st.integers(1, 9)), min_size=1)
)
def test_a_series_of_values_is_what_it_says(items):
    text = " ".join(f"{value}x{count}" for value, count in items)
    wanted = [value for value, count in items for _ in range(count)]
    assert shown(text) == pytest.approx(wanted, abs=1e-11)


@pytest.mark.parametrize(
    ("text", "at", "message", "hint"),
    [
        ("", 0, "a series has at least one item; this text is empty", "write items such as"),
        ("0.1x4 gab(0.1)x4", 6, "no draw is named 'gab'", "did you mean 'gap'?"),
        ("0.1x4 0,5x4", 6, "'0,5' cannot be read as a part of a series", "write items such as"),
        ("0.1x0", 4, "'0.1x0' is for no prompt group", "x400 says how many"),
        ("0.1x1000000000", 4, "is for more than 10,000,000 prompt groups", "x400 is for 400"),
        ("0.1x" + "9" * 5000, 4, "is for more than 10,000,000 prompt groups", "x400 is for 400"),
        ("gap(0.1", 0, "'gap(0.1' cannot be read as a part of a series", "write items such as"),
        ("gap(0.1))x3", 8, "')' cannot be read", "write items such as"),
        ("gap()", 0, "gap takes sd, found 0 arguments", "write gap(sd): Normal"),
        ("gap(0.1, 2)", 0, "gap takes sd, found 2 arguments", "write gap(sd)"),
        ("spike(0, x)", 9, "'x' cannot be read as a part of a series", "write spike(share, size)"),
        ("normal(0, 1)", 0, "no draw is named 'normal'", "known: gap, spike"),
        ("gap(-0.1)", 4, "gap: sd is between 0 and 50 nats", "write gap(sd)"),
        ("gap(0.1..0.2)", 4, "'0.1..0.2' cannot be read as a part of a series", "write gap(sd)"),
        ("spike(1, 2)", 6, "spike: share is between 0 and 1", "write spike(share, size)"),
        ("spike(0.1, 0)", 6, "spike: size is above 0", "write spike(share, size)"),
        ("99x4", 0, "a log ratio of 99 nats is none that two kernels show", "write -inf where"),
        ("0..0.5x4", 0, "'0..0.5' cannot be read", "write items such as"),
        ("0x9999999 0x9999", 0, "a series has at most 10,000,000 prompt groups", "a few thousand"),
        ("{braces}", 0, "'{braces}' cannot be read as a part of a series", "write items such as"),
        (256, 0, "a series is a text, found the number 256", "put it in quotes: 0x100"),
        (None, 0, "a series is a text", "write items such as"),
    ],
)
def test_what_is_no_series_is_refused_at_its_character(text, at, message, hint):
    with pytest.raises(PydanticCustomError) as caught:
        parse(text)
    assert message in caught.value.message()
    assert caught.value.context["at"] == at
    assert hint in caught.value.context["hint"]


@given(st.text(alphabet="0123456789.-_x()gapnormalspike, e\t", max_size=30))
def test_any_text_is_a_series_or_is_refused(text):
    try:
        series = parse(text)
    except PydanticCustomError as error:
        assert 0 <= error.context["at"] <= max(len(text), 1)
    else:
        assert 1 <= len(series) <= MOST_GROUPS and str(series) == text


def test_every_draw_says_what_it_is():
    assert all(draw.summary and draw.takes for draw in DRAWS.values())
