# verl 0.9.1: steps of its own trainer and functions, and its own DataProto; nothing is trained.
#
# The V1 trainer's methods are called on a trainer that has no Ray behind it: see verl_steps.py.
# The loops of the other trainers run whole, without Ray as well: see verl_fits.py.

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests.rl.monitor import verl_contracts

ROOT = Path(__file__).parents[2]
CALLS = ROOT / "tests" / "data" / "verl_calls.npz"


@pytest.fixture(scope="module")
def verl(venvs):
    """Runs the Python of verl as a launcher would, with the plug-in asked for."""

    def run(*arguments, **environment):
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("SERVANDA_VERL")}
        return subprocess.run(
            [f"{venvs}/verl/bin/python", "-W", "ignore", *map(str, arguments)],
            capture_output=True,
            text=True,
            cwd=ROOT,
            env={
                **inherited,
                "VERL_USE_EXTERNAL_MODULES": "servanda.rl.verl",
                "OMP_NUM_THREADS": "1",
                **environment,
            },
        )

    return run


@pytest.fixture(scope="module")
def steps(verl, tmp_path_factory):
    contracts = [
        verl_contracts.write(tmp_path_factory.mktemp("contract"), rules)
        for rules in (verl_contracts.WATCH, verl_contracts.CORRECT)
    ]
    script = Path(__file__).with_name("verl_steps.py")
    done = verl(script, *contracts, CALLS, SERVANDA_VERL=str(contracts[0]))
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


@pytest.fixture(scope="module")
def fits(verl, tmp_path_factory):
    contract = verl_contracts.write(tmp_path_factory.mktemp("contract"), verl_contracts.WATCH)
    script = Path(__file__).with_name("verl_fits.py")
    done = verl(script, contract, CALLS, SERVANDA_VERL=str(contract))
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def recorded_d_BT():
    with np.load(CALLS) as file:
        given = {name.removeprefix("given/"): file[name] for name in file.files}
    return given["old_log_probs"].astype(np.float64) - given["rollout_log_probs"]


@pytest.fixture(scope="module")
def recorded():
    d_BT = recorded_d_BT()
    width_B = [12 - i % 3 for i in range(len(d_BT))]  # as verl_steps.py cuts them
    return [d_T[:width] for d_T, width in zip(d_BT, width_B, strict=True)]


def test_a_step_is_measured_without_a_line_of_configuration(steps, recorded):
    metrics = steps[0]["decoupled"]["metrics"]
    assert metrics["servanda/active"] == metrics["servanda/compared"] == 1.0
    mean = np.abs(np.concatenate(recorded)).mean()
    assert metrics["servanda/abs_log_ratio_nats"] == pytest.approx(mean, rel=1e-5)
    assert metrics["servanda/staleness/max"] == 0.0
    assert "training/rollout_probs_diff_mean" in metrics  # verl's own are there as well


def test_the_labels_and_drafts_are_those_that_verl_has_of_each_sequence(steps):
    found = steps[0]["decoupled"]
    assert found["step"] == 3  # as verl's own log
    assert found["labels"] == {
        "cached_tokens": ["0", "1"],
        "env": ["gsm8k"],
        "weight_version": ["2"],
    }
    metrics = found["metrics"]
    accepted = sum(4 + i % 2 for i in range(16) if i % 4)
    assert metrics["servanda/draft_acceptance"] == accepted / (12 * 10)
    assert "servanda/draft_acceptance/depth_1" not in metrics  # verl counts no depths


def test_verl_writes_the_declared_weights_back_to_its_queue(steps, recorded):
    weights = steps[0]["corrected"]["rollout_is_weights"]
    for weight_T, d_T in zip(weights, recorded, strict=True):
        np.testing.assert_allclose(weight_T, np.minimum(np.exp(d_T), 1.02), rtol=1e-5)


def test_an_action_that_verl_leaves_no_room_for_is_an_error(steps):
    assert steps[0]["nowhere"]["error"] == (
        "ContractError: the contract says correct, and verl takes no batch back: rollout "
        "correction is off, or in bypass mode\n"
        "  hint: set algorithm.rollout_correction, and not its bypass_mode, or take correct out of "
        "the contract"
    )


def test_bypass_mode_says_that_nothing_is_compared_and_not_that_all_agrees(steps):
    found, said = steps[0]["bypass"], steps[1]
    metrics = found["metrics"]
    assert metrics["servanda/active"] == 1.0
    assert metrics["servanda/compared"] == metrics["servanda/coverage"] == 0.0
    assert metrics["servanda/exit_code"] == 4.0
    assert "servanda/abs_log_ratio_nats" not in metrics
    assert "there are no train logprobs, and nothing is compared" in said
    assert not found["asked"]


def test_in_bypass_mode_a_share_can_be_scored_after_all(steps, recorded):
    found = steps[0]["recomputed"]
    (asked,) = found["asked"]
    assert len(asked) == 4  # a quarter of 16, which two ranks share evenly
    chosen = [recorded[4 * int(key.split("_")[0]) + int(key.split("_")[1])] for key in asked]
    mean = np.abs(np.concatenate(chosen)).mean()
    metrics = found["metrics"]
    assert metrics["servanda/abs_log_ratio_nats"] == pytest.approx(mean, rel=1e-5)
    assert metrics["servanda/compared"] == 1.0 and metrics["servanda/share"] == 0.25
    assert found["left"] == {}  # verl's batch has nothing of what its share was scored with


def test_a_rollout_without_logprobs_is_an_error(steps):
    assert "set actor_rollout_ref.rollout.calculate_log_probs=True" in steps[0]["unasked"]["error"]


@pytest.mark.parametrize("trainer", ["legacy", "one_step_off", "fully_async"])
def test_bypass_mode_has_a_share_scored_in_every_trainer(fits, trainer):
    """Two ranks whose micro-batches are of four: verl's engine takes no other number of them."""
    found = fits[trainer]
    steps = 4 if trainer == "fully_async" else 2
    assert found["steps"] == [*range(1, steps + 1)]
    assert [len(rows) for rows in found["asked"]] == [4] * steps
    d_BT = np.abs(recorded_d_BT())
    gaps = [d_BT[rows].mean() for rows in found["asked"]]
    if trainer == "fully_async":  # it logs a sync of two steps, when the next has begun
        gaps = [gaps[0], np.mean(gaps[1:3])]
    for metrics, gap in zip(found["metrics"], gaps, strict=True):
        assert metrics["servanda/abs_log_ratio_nats"] == pytest.approx(gap, rel=1e-4)
        assert metrics["servanda/active"] == metrics["servanda/compared"] == 1.0
        assert metrics["servanda/share"] == 0.25
        assert metrics["actor/pg_loss"] == 0.5
    assert not found["saved"]  # weights are not copied for it
    assert "servanda:" not in found["said"]


@pytest.mark.parametrize("trainer", ["legacy", "one_step_off", "fully_async"])
def test_a_trainer_that_scores_each_batch_is_judged_on_each(fits, trainer):
    found = fits[f"{trainer} decoupled"]
    assert {len(rows) for rows in found["asked"]} == {16}  # by verl itself
    assert len(found["asked"]) == len(found["steps"])
    for metrics in found["metrics"]:
        wanted = np.abs(recorded_d_BT()).mean()
        assert metrics["servanda/abs_log_ratio_nats"] == pytest.approx(wanted, rel=1e-4)
        assert "servanda/share" not in metrics


@pytest.mark.parametrize("trainer", ["legacy", "one_step_off", "fully_async"])
def test_a_run_without_logprobs_of_the_rollout_says_so_at_its_first_step(fits, trainer):
    found = fits[f"{trainer} silent"]
    assert not found["steps"] and "servanda/active" not in found["metrics"][0]
    said = found["said"][found["said"].index("servanda:") :].split("\n")[:2]
    assert said == [
        "servanda: error: step 1 of verl's log has no servanda/active: its rollout returned no "
        "logprobs, and this run is not judged.",
        "  hint: set actor_rollout_ref.rollout.calculate_log_probs=True",
    ]
    assert found["said"].count("servanda:") == 1


def test_a_share_of_none_is_an_error_of_each_step_in_other_trainers_too(fits):
    found = fits["legacy unscored"]
    assert not found["asked"] and found["steps"] == [1, 2]
    assert {metrics["servanda/compared"] for metrics in found["metrics"]} == {0.0}
    assert found["said"].count("leave out SERVANDA_VERL_RECOMPUTE=0") == 1


def test_a_launcher_is_told_what_each_trainer_has_judged(verl):
    done = verl("-m", "servanda.rl.verl", "--check", SERVANDA_VERL="verl-sync")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    first = lines.index("verl is watched: verl-sync")
    assert [line.split() for line in lines[first + 2 : -1]] == [
        [*name.split(), *what.split()]
        for name, what in {
            "V1, sync": "every batch is judged",
            "V1, colocate_async": "every batch is judged",
            "V1, separate_async": "every batch is judged",
            "trainer.use_v1=False": "every batch is judged",
            "one_step_off_policy": "6 % of the sequences are judged (bypass mode)",
            "fully_async_policy": "6 % of the sequences are judged (bypass mode)",
        }.items()
    ]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (
            "trainer.use_v1=False algorithm.rollout_correction.bypass_mode=True trainer.nnodes=2",
            0,
            "trainer.use_v1=False: 6 % of the sequences are judged (bypass mode)",
        ),
        (
            "--config-name fully_async_ppo_megatron_trainer async_training.require_batches=2",
            0,
            "fully_async_policy: 6 % of the sequences are judged (bypass mode)",
        ),
        (
            "-m verl.experimental.one_step_off_policy.main_ppo "
            "actor_rollout_ref.rollout.calculate_log_probs=False",
            2,
            "one_step_off_policy: nothing: its rollout returns no logprobs; set "
            "actor_rollout_ref.rollout.calculate_log_probs=True",
        ),
        ("trainer.v1.trainer_mode=sepaate_async", 2, "  hint: did you mean 'separate_async'?"),
        (
            "trainer.usev1=False",
            2,
            "  hint: give the arguments as verl gets them, such as trainer.use_v1=False",
        ),
    ],
)
def test_a_launcher_is_told_what_of_its_run_is_judged(verl, arguments, code, said):
    done = verl("-m", "servanda.rl.verl", "--check", *arguments.split(), SERVANDA_VERL="verl-sync")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (code, said), done.stderr[-2000:]


def test_a_plug_in_that_verl_leaves_out_is_found_out(verl):
    done = verl(
        *("-m", "servanda.rl.verl", "--check"),
        SERVANDA_VERL="verl-sync",
        VERL_USE_EXTERNAL_MODULES="",
        VERL_USE_EXTERNAL_PLUGINS="none",
    )
    assert done.returncode == 2
    assert "verl.utils.debug.metrics is not watched" in done.stdout


def test_without_the_variable_verl_is_as_it_was(verl):
    code = (
        "import verl, sys, verl.utils.debug.metrics as metrics\n"
        "changed = hasattr(metrics.calculate_debug_metrics, '__servanda__')\n"
        "print(changed, 'servanda.rl.monitor.monitor' in sys.modules)"
    )
    done = verl("-c", code)
    assert done.stdout.splitlines()[-1] == "False False", done.stderr[-2000:]
