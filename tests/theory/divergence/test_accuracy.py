# The promise of docs/reference/accuracy.md: digits are kept where good kernels live.

import numpy as np
import pytest
from benchmarks import accuracy

from servanda.theory.divergence.base import DIVERGENCES, sampled


@pytest.mark.parametrize("noise", accuracy.NOISES)
@pytest.mark.parametrize("name", [*accuracy.TEXTBOOK])
def test_an_exact_form_is_within_the_stated_bound(name, noise):
    assert accuracy.measure(name, noise, vocabulary=150).ours <= accuracy.BOUND


def test_the_page_states_the_bound_and_every_exact_metric():
    page = accuracy.DOCS.read_text(encoding="utf-8")
    assert f"is at most\n{accuracy.BOUND:g}.**" in page
    exact_names = {n for n, d in DIVERGENCES.items() if "logits" in d.forms}
    assert {*accuracy.TEXTBOOK} == exact_names - {"top1_flip"}
    for name in accuracy.TEXTBOOK:
        assert f"| `{name}` |" in page


@pytest.mark.parametrize(
    ("name", "per_x2"),
    [("k3_nats", 0.5), ("k2_nats", 0.5), ("chi2", 1.0), ("kl_reverse_nats", 0.5)],
)
def test_a_sampled_form_of_second_order_keeps_its_digits(name, per_x2):
    x = np.array([1e-4, -1e-4, 1e-5])
    values = sampled(name, {"logp_train": x - 1, "logp_infer": np.full(3, -1.0)})
    assert values == pytest.approx(per_x2 * x**2, rel=2e-4)
