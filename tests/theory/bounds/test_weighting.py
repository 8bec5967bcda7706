# Weightings: every value lies in the span that a certificate relies on, to the last bit.

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from servanda.errors import EvidenceError
from servanda.theory.bounds.importance_weights import PSI, weight_gap

HUNDREDTHS = [c / 100 for c in range(301)]
WEIGHTS = np.concatenate([[0.0], 2.0 ** np.linspace(-60, 60, 241), np.arange(0, 401) / 100])
with np.errstate(divide="ignore"):
    LOG_RATIOS = np.concatenate([np.log(WEIGHTS), [800.0]])

caps = st.one_of(st.sampled_from(HUNDREDTHS), st.floats(0.0, 100.0))
bands = st.tuples(st.sampled_from(HUNDREDTHS[:101]), st.sampled_from(HUNDREDTHS[100:]))


def within(psi, log_ratio_N):
    found_N = weight_gap(log_ratio_N, psi)
    return bool(((found_N >= psi.span[0]) & (found_N <= psi.span[1])).all())


@pytest.mark.parametrize("c", HUNDREDTHS)
def test_a_clipped_weight_never_leaves_its_span(c):
    assert within(PSI["clip"](c), LOG_RATIOS)


@given(st.sampled_from(sorted(PSI)), caps, bands, st.floats(-50.0, 50.0))
def test_no_weighting_leaves_its_span(name, cap, band, log_ratio):
    declared = {"naive": (), "is": (), "tis": (cap,), "clip": (cap,)}
    psi = PSI[name](*declared.get(name, (band,)))
    assert within(psi, np.append(LOG_RATIOS, log_ratio))


@pytest.mark.parametrize("psi", [PSI["is"](), PSI["tis"](math.inf), PSI["mis"]((0.0, math.inf))])
def test_a_weight_beyond_float64_that_is_left_alone_has_no_excess(psi):
    assert weight_gap(np.array([800.0]), psi).tolist() == [-math.inf]


@pytest.mark.parametrize("name", ["naive", "is"])
def test_what_was_drawn_had_mass(name):
    with pytest.raises(EvidenceError) as raised:
        weight_gap(np.array([0.0, math.inf]), PSI[name]())
    assert str(raised.value) == (
        "what was sampled has no usable log ratio\n"
        "  hint: drop sequences with unusable tokens as missing first"
    )


def test_a_token_without_a_value_has_no_gap():
    assert np.isnan(weight_gap(np.array([math.nan]), PSI["tis"](2.0))).all()
