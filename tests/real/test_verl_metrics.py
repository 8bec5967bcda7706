# The threshold checks of benchmarks/experiment/guards.py against verl's own functions.

import json
import subprocess

import numpy as np
import pytest
from benchmarks.experiment.guards import measure

VERL = """
import json, sys
import torch
from verl.protocol import DataProto
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask
from verl.utils.debug.metrics import calculate_debug_metrics

old, rollout, mask = (torch.tensor(a) for a in json.load(sys.stdin))
_, _, found = compute_rollout_correction_and_rejection_mask(
    old, rollout, mask, rollout_is="token", rollout_is_threshold=2.0
)
batch = {"old_log_probs": old, "rollout_log_probs": rollout}
batch |= {"response_mask": mask, "responses": mask.long()}
found |= calculate_debug_metrics(DataProto.from_dict(tensors=batch))
print(json.dumps(found))
"""
NAMES = {
    "k1": "rollout_corr/kl",
    "k3": "rollout_corr/k3_kl",
    "chi2_token": "rollout_corr/chi2_token",
    "is_mean": "rollout_corr/rollout_is_mean",
    "is_std": "rollout_corr/rollout_is_std",
    "ess": "rollout_corr/rollout_is_eff_sample_size",
    "probs_diff_mean": "training/rollout_probs_diff_mean",
}


@pytest.mark.parametrize("sigma", [0.05, 1.0])
def test_verl_finds_the_same_numbers(venvs, sigma):
    python = venvs / "verl" / "bin" / "python"
    if not python.exists():
        pytest.skip(f"no verl in {venvs}")
    rng = np.random.default_rng(1)
    rollout = -rng.exponential(1.0, (16, 40))
    old = np.minimum(rollout + sigma * rng.standard_normal((16, 40)), 0.0)
    mask = (np.arange(40) < rng.integers(5, 41, (16, 1))).astype(float)
    given = json.dumps([a.tolist() for a in (old, rollout, mask)])

    done = subprocess.run(
        [python, "-c", VERL], input=given, capture_output=True, text=True, check=True
    )

    theirs = json.loads(done.stdout.splitlines()[-1])
    ours = measure(old, rollout, mask)
    assert {n: ours[n] for n in NAMES} == pytest.approx(
        {n: theirs[name] for n, name in NAMES.items()}, rel=2e-3, abs=1e-6
    )
