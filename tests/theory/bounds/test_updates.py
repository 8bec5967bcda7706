# Updates, penalties, environments, thirds and directions: against enumeration, and their domains.

import itertools
import math

import numpy as np
import pytest
from benchmarks.theory.theorems.updates import (
    clipped_update_bias,
    episode_tv,
    gradient_cosine,
    penalised_reward_bias,
    tv_through_a_third,
)
from hypothesis import given
from hypothesis import strategies as st

from servanda.errors import EvidenceError

laws = st.lists(st.integers(1, 9), min_size=2, max_size=2).map(lambda x: [i / sum(x) for i in x])


@given(st.lists(laws, min_size=14, max_size=14))
def test_an_episode_is_bounded_by_its_own_tokens_whatever_the_environment_answers(draws):
    """Two turns with an environment between them, every episode by hand."""
    own, other = draws[0], draws[1]
    world = dict(zip((0, 1), draws[2:4], strict=True))
    places = [*itertools.product((0, 1), repeat=2)]
    train, infer = (dict(zip(places, d, strict=True)) for d in (draws[4:8], draws[8:12]))
    exact, bound = 0.0, 0.0
    for a, o in places:
        for b in (0, 1):
            p, q = own[a] * world[a][o] * train[a, o][b], other[a] * world[a][o] * infer[a, o][b]
            exact += abs(p - q) / 2
        steps = [0.5 * sum(map(abs, np.subtract(own, other)))]
        steps.append(0.5 * sum(map(abs, np.subtract(train[a, o], infer[a, o]))))
        bound += other[a] * world[a][o] * episode_tv(steps, [2]).item()

    assert exact <= bound + 1e-12


def test_what_a_clip_leaves_grows_with_the_larger_of_its_two_ends():
    """By hand: A = 2, so h is at most 2 x max(1.2, 3) = 6."""
    assert clipped_update_bias(0.1, 2, 1, high=0.2, dual=3).item() == pytest.approx(0.6)
    assert clipped_update_bias(0.1, 2, 1, high=0.2, dual=1.1).item() == pytest.approx(0.24)
    assert penalised_reward_bias(0.1, 2, 1, beta=0.5, clip=4).item() == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("call", "found", "next_move"),
    [
        (lambda: clipped_update_bias(0.1, 1, 1, 0.2, math.inf), "dual is inf", "dual clip"),
        (lambda: clipped_update_bias(0.1, 1, 1, 0.2, 0.5), "dual is 0.5", "dual clip"),
        (lambda: penalised_reward_bias(0.1, 1, 1, 0.1, math.inf), "clip is inf", "cut the log"),
        (lambda: penalised_reward_bias(0.1, 1, 1, -0.1, 1), "beta is -0.1", ""),
        (lambda: episode_tv([0.5, 1.5], [2]), "tv is 1.5", ""),
        (lambda: episode_tv([0.5], [2]), "1 tokens for 1 sequences of 2", "one after another"),
        (lambda: tv_through_a_third(-0.1, 0.2), "one is -0.1", ""),
        (lambda: gradient_cosine(1.0, 1.0), "any direction is possible", "smaller gap"),
        (lambda: gradient_cosine(math.nan, 1.0), "bias is nan", ""),
    ],
)
def test_a_number_outside_of_the_domain_is_refused_with_the_next_move(call, found, next_move):
    with pytest.raises(EvidenceError) as error:
        call()

    assert found in error.value.problems[0].message
    assert next_move in error.value.problems[0].hint
