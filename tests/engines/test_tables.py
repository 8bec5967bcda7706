# Tables: exact expectations against brute enumeration.

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from servanda.engines.table import Table
from servanda.errors import MeasurementError
from tests import oracles
from tests.table_pair import TablePair

TOKENS = ("a", "b", "<eos>")
rows = st.lists(st.integers(0, 6), min_size=3, max_size=3).filter(any)
tables = st.fixed_dictionaries({"": rows, "a": rows, "b": rows})


def table(counts):
    norm = {c: tuple(np.array(r) / sum(r)) for c, r in counts.items()}
    return Table(TOKENS, 2, 1, norm)


def walk(pair, prompt, width, new=(), q=1.0):
    """(context, probability under infer) by recursion over whole prefixes."""
    if len(new) == width or (new and new[-1] == 2):
        return
    yield (*prompt, *new), q
    _, q_V = pair.rows((*prompt, *new))
    for token in range(3):
        if q_V[token]:
            yield from walk(pair, prompt, width, (*new, token), q * q_V[token])


@given(tables, tables)
def test_the_mean_tv_is_the_enumerated_one(p, q):
    pair = TablePair(table(p), table(q))
    visits = list(walk(pair, (0,), 4))
    tv = math.fsum(m * oracles.tv(*pair.rows(c)) for c, m in visits)
    tokens = math.fsum(m for _, m in visits)
    assert pair.mean_tv([(0,)], 4) == pytest.approx(tv / tokens, abs=1e-12)


@given(tables, tables)
def test_the_laws_of_sequences_add_up_and_bound_each_other(p, q):
    pair = TablePair(table(p), table(q))
    law = list(pair.sequences((0,), 4))
    assert math.fsum(x for _, x, _ in law) == pytest.approx(1)
    assert math.fsum(y for _, _, y in law) == pytest.approx(1)
    tv = pair.sequence_tv((0,), 4)
    steps = pair.expected((0,), 4, pair.token_tv)
    assert tv <= steps + 1e-12  # TV of sequences <= E_infer of the sum of token TVs
    reward = lambda y: float(len(y) % 2)  # noqa: E731
    assert abs(pair.reward_drift((0,), 4, reward)) <= tv + 1e-12


@given(tables, tables)
def test_the_weight_gap_of_no_correction_is_twice_the_tv_and_of_full_correction_the_lost_mass(p, q):
    pair = TablePair(table(p), table(q))
    naive = pair.weight_gap((0,), 4, lambda w: np.ones_like(w))
    assert naive == pytest.approx(2 * pair.mean_tv([(0,)], 4), abs=1e-12)
    lost = pair.expected((0,), 4, lambda c: float(pair.rows(c)[0][pair.rows(c)[1] == 0].sum()))
    tokens = pair.expected((0,), 4, lambda _: 1.0)
    assert pair.weight_gap((0,), 4, lambda w: w) == pytest.approx(lost / tokens, abs=1e-12)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not a table"),
        ('{"tokens": ["a"], "eos": "b", "rows": {"": [1]}}', "not a table"),
        ('{"tokens": ["a", "b"], "eos": "b", "rows": {"a": [0.5, 0.5]}}', "no row ''"),
        ('{"tokens": ["a", "b"], "eos": "b", "rows": {"": [0.5, 0.4]}}', "no distribution"),
        ('{"tokens": ["a", "b"], "eos": "b", "rows": {"": [1.5, -0.5]}}', "no distribution"),
        ('{"tokens": ["a", "b"], "eos": "b", "rows": {"": [1.0]}}', "1 values for 2 tokens"),
    ],
)
def test_what_is_no_table_is_refused_with_its_place(text, message):
    with pytest.raises(MeasurementError, match=message) as caught:
        Table.parse(text, "p.json")
    assert "p.json" in str(caught.value)


def test_the_longest_known_suffix_is_the_context():
    data = {
        "tokens": ["a", "b", "."],
        "eos": ".",
        "order": 2,
        "rows": {"": [1, 0, 0], "b": [0, 1, 0], "a b": [0, 0, 1]},
    }
    parsed = Table.parse(json.dumps(data), "t")
    assert [parsed.row_of(c) for c in [(), (0,), (1,), (1, 1), (0, 1)]] == [0, 0, 1, 1, 2]
