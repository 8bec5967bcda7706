# Whatever is done to a contract, it is read or its problems are told in their places.

from __future__ import annotations

import itertools
import sys
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from servanda.errors import ContractError
from tests.contract.test_language import SMALL
from tests.contract.test_whole_language import WHOLE
from tests.drawn import examples
from tests.fuzzing import MUTATIONS, broken, read_or_told
from tests.kit import parse


@pytest.mark.slow
@settings(max_examples=examples(200))
@given(st.randoms(use_true_random=False))
def test_a_broken_contract_is_read_or_told(rng):
    read_or_told(broken(rng))


@pytest.mark.parametrize("mutation", [*dict.fromkeys(MUTATIONS)], ids=lambda m: m.__name__)
def test_every_mutation_breaks_something(mutation):
    rng = Random(2)
    texts = {"\n".join(mutation(WHOLE.split("\n"), rng)) for _ in range(20)} - {WHOLE}

    assert len(texts) > 5


def calls(text: str) -> int:
    """How many functions are called to read a text, those of C included."""
    count = 0

    def seen(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(seen)
    try:
        parse(text, "x.yaml", engines=["table"])
    except ContractError:
        pass
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.slow
@pytest.mark.parametrize(
    "clause",
    [
        "{{id: c{i}, metric: tv, aggregate: mean, at_most: 0.1}}",
        "{{id: c{i}, metric: vt, aggregat: mean, at_most: '1'}}",
    ],
    ids=["good", "bad"],
)
def test_clauses_are_read_in_linear_time(clause):
    """Counted in calls, which no busy machine makes more of."""
    counts = [
        calls(SMALL + "".join(f"  - {clause.format(i=i)}\n" for i in range(n)))
        for n in (100, 200, 400, 800)
    ]

    for fewer, more in itertools.pairwise(counts):
        assert more < 2.05 * fewer
