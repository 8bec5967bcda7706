# The rules of other projects: held to recordings of the projects' own functions on the same arrays.

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from servanda.judgement.field_rules import RULES, RuleSums, rows
from servanda.judgement.token_profile import Sums

RECORDED = json.loads((Path(__file__).parents[1] / "data/field_rules.json").read_text("utf-8"))
OUTPUTS = {  # (project, rule) -> the recorded number
    ("NeMo-RL", "token_mult_prob_error"): lambda o: o["token_mult_prob_error"],
    ("NeMo-RL", "gen_kl_error"): lambda o: o["gen_kl_error"],
    ("NeMo-RL", "seq_logprob_error"): lambda o: o["max_seq_mult_prob_error"],
    ("prime-rl", "mismatch_kl"): lambda o: o["mismatch_kl/all/mean"],
    ("miles", "log_probs, rollout_log_probs"): lambda o: abs(
        float(o["rollout/log_probs"]) - float(o["rollout/rollout_log_probs"])
    ),
    ("slime", "train_rollout_logprob_abs_diff"): lambda o: o["train_rollout_logprob_abs_diff"],
    ("verl", "rollout_corr/kl"): lambda o: abs(float(o["off_policy"]["kl"])),
    ("verl", "rollout_probs_diff_mean"): lambda o: o["debug"]["rollout_probs_diff_mean"],
    ("SkyRL", "rollout_train_logprobs_abs_diff_mean"): lambda o: o["forward"]["mean"],
}
# a NaN at a masked place poisons some of the projects' sums: a dump has no number there at all
MASKED = {"nan_masked"}


def arrays(given):
    columns = (np.array([[float(v) for v in row] for row in given[name]]) for name in (
        "logp_train", "logp_infer", "mask"))  # fmt: skip
    train_ST, infer_ST, mask_ST = columns
    return train_ST, infer_ST, mask_ST > 0


def sums_of(train_ST, infer_ST, mask_ST):
    usable_ST = mask_ST & ~np.isnan(train_ST) & np.isfinite(infer_ST) & (train_ST < np.inf)
    t_K, g_K = train_ST[usable_ST], infer_ST[usable_ST]
    x_K = t_K - g_K
    with np.errstate(over="ignore"):
        tokens = Sums(
            n=len(x_K),
            abs_log_ratio=float(np.abs(x_K).sum()),
            exp_abs=float(np.exp(np.abs(x_K)).sum()),
            k1=float((g_K - t_K).sum()),
            k3=float((np.expm1(x_K) - x_K).sum()),
            prob_diff=float(np.abs(np.exp(t_K) - np.exp(g_K)).sum()),
        )
    n_S = mask_ST.sum(axis=1)
    x_ST = np.where(usable_ST, train_ST, 0.0) - np.where(usable_ST, infer_ST, 0.0)
    with np.errstate(over="ignore"):
        exp_S = np.where(usable_ST, np.exp(np.abs(x_ST)), 0.0).sum(axis=1)
    drift_S, largest = np.abs(x_ST).sum(axis=1), float(np.abs(x_K).max(initial=0.0))
    return RuleSums.of(tokens, n_S, drift_S, x_ST.sum(axis=1), exp_S, largest)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.project} {rule.name}")
def test_a_rule_gives_what_its_project_gives(rule):
    (project,) = [p for p in RECORDED["projects"] if p["project"] == rule.project]
    compared = 0
    for given, recorded in zip(RECORDED["inputs"], project["recordings"], strict=True):
        assert recorded["input"] == given["name"]
        if given["name"] in MASKED or "error" in recorded["output"]:
            continue
        output = recorded["output"]
        try:
            own = float(OUTPUTS[rule.project, rule.name](output))
        except (KeyError, TypeError):
            continue  # the project gives no number for this step
        value = rule.value(sums_of(*arrays(given)))
        if value is None:
            assert own in (0.0,) or math.isnan(own), given["name"]
        elif math.isnan(value) or math.isnan(own):
            continue  # each project has its own answer to a token without a logprob
        elif math.isinf(own):
            assert value > 1e30, given["name"]  # float32 overflows earlier
        else:
            assert value == pytest.approx(own, rel=2e-5, abs=2e-6), given["name"]
        compared += 1
    assert compared >= 15


def test_steps_at_which_a_rule_is_no_number_are_counted_and_never_within_a_limit():
    good, lost = (of_noise(0.001), replace(of_noise(0.001), lost=1))
    row = rows([(1, good), (2, lost), (3, of_noise(0.5))])[1]
    assert (row.steps, row.unknown, row.red, row.first, row.worst) == (3, 1, 1, 3, 3)
    none = rows([(1, lost)])[0]
    assert (none.value, none.unknown, none.red) == (None, 1, 0)
    assert rows([(1, RuleSums())])[0].unknown == 0  # no trained token is no lost one


def of_noise(nats):
    infer_ST = np.full((4, 5), -1.0)
    return sums_of(infer_ST + nats, infer_ST, np.ones((4, 5), dtype=bool))
