# Acting: what rules say, what is done of it, and the weights that tokens get.

import numpy as np
import pytest

from servanda.errors import ContractError
from servanda.rl import Monitor
from tests.rl.monitor.made import Q, step
from tests.rl.monitor.test_monitor import contract

RULES = """
escalation:
  - {when: {clause: tv, is: violated}, do: [mask, {sample: 0.5}, {page: oncall}]}
  - {when: {section: statistical, is: violated}, do: [correct]}
  - {when: {section: observability, is_not: holds}, do: [halt]}
"""


def given(size=32, width=256, tv=0.004):
    train, infer, mask = step(np.random.default_rng(0), size, width, tv)
    return {
        "logp_train_BT": train,
        "logp_infer_BT": infer,
        "mask_BT": mask,
        "labels": {"env": ["a", "b"] * (size // 2)},
        "staleness": np.zeros(size),
    }


def test_without_rules_a_declared_weighting_is_applied_and_nothing_else_is_done():
    shown = given(tv=0.35)
    found = Monitor(contract()).observe(**shown, weights=0)

    w = np.exp(shown["logp_train_BT"].astype(float) - shown["logp_infer_BT"])
    inside = (w >= 0.5) & (w <= 2.0) & shown["mask_BT"]
    assert found.outcome == "violated"
    assert (found.action, found.would) == (("correct",), ())
    assert found.token_weights.dtype == np.float32
    assert np.allclose(found.token_weights, np.where(inside, w, 0.0))


def test_without_rules_and_weighting_tokens_weigh_one():
    shown = given(tv=0.3)
    found = Monitor("verl-sync").observe(**shown, weights=0)

    assert (found.outcome, found.action) == ("violated", ())
    assert (found.token_weights == shown["mask_BT"]).all()


def test_rules_act_in_their_order_and_only_where_they_are_met():
    tv = np.where(np.arange(256) >= 64, 0.002, 0.3)
    quiet = Monitor(contract(RULES)).observe(**given(tv=0.0), weights=0)
    found = Monitor(contract(RULES)).observe(**given(tv=tv), weights=0)

    assert (quiet.action, quiet.masked) == ((), ())
    assert found.action == ("mask", "sample", "page", "correct")
    assert found.pages == ("oncall",)


def test_masked_are_the_red_slices_that_the_rest_keeps_its_limit_without():
    tv = np.where(np.arange(256) >= 64, 0.002, 0.3)
    rules = RULES.splitlines()[0:3]
    shown = given(tv=tv)
    found = Monitor(contract("\n".join(rules))).observe(**shown, weights=0)

    assert {*found.masked} == {"depth<16", "depth=16..64"}
    at = np.arange(256)
    assert (found.token_weights == (shown["mask_BT"] & (at >= 64))).all()


def test_a_stop_is_only_told_unless_it_was_switched_on():
    shown = given()
    shown["logp_infer_BT"] = np.full_like(shown["logp_infer_BT"], np.nan)
    watching, stopping = (Monitor(contract(RULES), stop=stop) for stop in (False, True))

    told = watching.observe(**shown, weights=7)
    done = stopping.observe(**shown, weights=7)

    assert ("halt" in told.action, told.would) == (False, ("halt",))
    assert ("halt" in done.action, done.would) == (True, ())
    watching.observe(**shown, weights=8)
    assert watching.would_have_stopped == 7


@pytest.mark.parametrize("action", ["hold", "roll_back", "{mirror: 0.1}"])
def test_an_action_that_no_trainer_takes_is_refused_in_its_contract(action):
    rule = f"escalation:\n  - {{when: {{clause: tv, is: violated}}, do: [{action}]}}\n"
    with pytest.raises(ContractError) as error:
        contract(rule)
    name = action.strip("{}").split(":")[0]
    assert f"{name} is taken by" in str(error.value)
    assert "a trainer takes sample, correct, mask, halt and page" in str(error.value)


def test_to_correct_without_a_weighting_is_refused():
    text = "escalation:\n  - {when: {clause: tv, is: violated}, do: [correct]}\n"
    from tests.kit import parse
    from tests.rl.monitor.test_monitor import CONTRACT

    bare = CONTRACT.replace(", weighting: {mis: [0.5, 2.0]}", "")
    with pytest.raises(ContractError, match="correct weighs tokens by gradient"):
        parse(bare + text, "run.kernelcontract.yaml", engines=["table"])


def test_the_made_truth_is_what_it_says():
    """(1 - w)^+ averages to the TV that was moved."""
    train, infer, mask = step(np.random.default_rng(0), 64, 512, 0.1, dtype=np.float64)
    mean = np.maximum(1 - np.exp(train - infer), 0)[mask].mean()
    assert mean == pytest.approx(0.1, abs=4 * 0.1 / Q / np.sqrt(mask.sum()))


def test_what_is_done_is_logged_and_so_is_what_could_have_been():
    rules = "\nescalation:\n  - {when: {clause: tv, is: violated}, do: [mask, {page: oncall}]}"
    late = np.where(np.arange(256) >= 64, 0.002, 0.3)
    for tv, done in ((0.0, 0.0), (late, 1.0)):
        metrics = Monitor(contract(rules)).observe(**given(tv=tv), weights=0).metrics
        assert {n: v for n, v in metrics.items() if n.startswith("servanda/action/")} == {
            "servanda/action/mask": done,
            "servanda/action/page": done,
        }
