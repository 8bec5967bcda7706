# Corrections: the predicted bias and noise, against the exact ones of kernels that are enumerated.

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from servanda.errors import EvidenceError
from servanda.theory.bounds.corrections import CORRECTIONS, token_errors
from tests.theory.bounds.enumerated import answers, pair

COUNT = st.integers(0, 9)
ROW = st.tuples(COUNT, COUNT, st.integers(1, 9))


def _rows(draw):
    return {context: draw(ROW) for context in ("", "a", "b")}


@st.composite
def kernels(draw):
    """Two kernels on a vocabulary of three; some tokens have no mass under one of them."""
    return answers(pair(_rows(draw), _rows(draw)))


def _biases(of, psi_N, advantage_N, score_NC):
    """The norm of the bias of the token-level surrogate, and of the mean of each response."""
    response_N = np.repeat(np.arange(len(of.length_S)), of.length_S)
    q_N = of.infer_S[response_N]
    w_N = np.exp(of.log_ratio_N)
    W_N = (of.train_S / of.infer_S)[response_N]
    length_N = of.length_S[response_N]
    moved_NC = (q_N * advantage_N)[:, None] * score_NC
    tokens = of.mean(of.length_S)
    surrogate = ((psi_N - w_N)[:, None] * moved_NC).sum(0) / tokens
    response = (((psi_N - W_N) / length_N)[:, None] * moved_NC).sum(0)
    return np.linalg.norm(surrogate), np.linalg.norm(response)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", [*CORRECTIONS])
@given(of=kernels(), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_no_gradient_is_further_off_than_predicted(name, of, seed):
    """Advantages and scores that may depend on the whole response, within their bounds."""
    rng = np.random.default_rng(seed)
    correction = CORRECTIONS[name]
    psi_N = correction.weights(of.log_ratio_N, of.length_S)
    advantage_N = rng.uniform(-1, 1, len(psi_N))
    score_NC = rng.standard_normal((len(psi_N), 2))
    score_NC /= np.linalg.norm(score_NC, axis=1, keepdims=True)
    errors = token_errors(correction, of.log_ratio_N, of.length_S)
    q_N = np.repeat(of.infer_S, of.length_S)

    surrogate, response = _biases(of, psi_N, advantage_N, score_NC)

    predicted = float(q_N @ errors.surrogate) / of.mean(of.length_S)
    assert surrogate <= predicted + 1e-12
    assert response <= of.mean(errors.response) + 1e-12


@pytest.mark.parametrize("name", [*CORRECTIONS])
def test_the_worst_advantages_attain_what_is_predicted(name):
    of = answers(pair({"": (5, 3, 2), "b": (1, 7, 2)}, {"": (2, 6, 2), "b": (4, 4, 2)}))
    correction = CORRECTIONS[name]
    psi_N = correction.weights(of.log_ratio_N, of.length_S)
    errors = token_errors(correction, of.log_ratio_N, of.length_S)
    q_N = np.repeat(of.infer_S, of.length_S)
    W_N = np.repeat(of.train_S / of.infer_S, of.length_S)
    one_N1 = np.ones((len(psi_N), 1))

    surrogate, _ = _biases(of, psi_N, np.sign(psi_N - np.exp(of.log_ratio_N)), one_N1)
    _, response = _biases(of, psi_N, np.sign(psi_N - W_N), one_N1)

    predicted = float(q_N @ errors.surrogate) / of.mean(of.length_S)
    assert surrogate == pytest.approx(predicted, abs=1e-12)
    assert response == pytest.approx(of.mean(errors.response), abs=1e-12)


@given(of=kernels())
@settings(max_examples=40, deadline=None)
def test_the_noise_is_that_of_scores_without_correlation(of):
    """Scores of unit norm, orthogonal between the tokens of a response."""
    for correction in CORRECTIONS.values():
        psi_N = correction.weights(of.log_ratio_N, of.length_S)
        second = 0.0
        for chance, psi in zip(of.infer_S, np.split(psi_N, of.length_S.cumsum()[:-1]), strict=True):
            summed = psi @ np.eye(len(psi))
            second += chance * float(summed @ summed)
        errors = token_errors(correction, of.log_ratio_N, of.length_S)
        q_N = np.repeat(of.infer_S, of.length_S)
        assert float(q_N @ errors.square) == pytest.approx(second)


def test_each_correction_weighs_as_its_name_says():
    log_ratio_N = np.log([0.25, 1.1, 4.0, 1.0, 1.0])
    length_S = [3, 2]
    expected = {
        "none": [1, 1, 1, 1, 1],
        "tis": [0.25, 1.1, 2, 1, 1],
        "icepop": [0, 1.1, 4, 1, 1],
        "reject": [0, 1, 0, 1, 1],
        "clip": [0.8, 1.1, 1.2, 1, 1],
        "seq_tis": [1.1, 1.1, 1.1, 1, 1],
        "seq_mis": [1.1, 1.1, 1.1, 1, 1],
        "geometric": [0, 0, 0, 1, 1],
        "geometric_tis": [0, 0, 0, 1, 1],
    }
    assert {*expected} == {*CORRECTIONS}
    for name, weights in expected.items():
        assert CORRECTIONS[name].weights(log_ratio_N, length_S) == pytest.approx(weights), name


def test_a_token_that_train_cannot_sample_has_weight_0_and_a_response_with_it_too():
    errors = token_errors(CORRECTIONS["seq_tis"], [0.0, -np.inf], [2])
    assert errors.masked.tolist() == [1.0, 1.0]
    assert errors.response.tolist() == [1.0]


def test_an_unusable_log_ratio_is_refused():
    with pytest.raises(EvidenceError, match="no usable log ratio"):
        token_errors(CORRECTIONS["tis"], [0.0, np.nan], [2])
    with pytest.raises(EvidenceError, match="2 tokens for 1 sequences of 3"):
        token_errors(CORRECTIONS["tis"], [0.0, 0.0], [3])
