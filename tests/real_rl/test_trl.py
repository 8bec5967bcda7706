# TRL 1.16: real runs of GRPOTrainer on models/tiny-lm, whose rollouts an engine in bfloat16 draws.

import json
import os
import subprocess
from pathlib import Path

import pytest

from servanda.rl import read_state
from tests.rl.monitor import verl_contracts

ROOT = Path(__file__).parents[2]
BOTH = (
    "[{when: {clause: finite, is_not: error}, do: [correct]}, "
    "{when: {clause: gradient, is: violated}, do: [mask]}]"
)


@pytest.fixture(scope="module")
def trl(venvs):
    """Runs the Python of TRL."""

    def run(*arguments, cwd=ROOT):
        return subprocess.run(
            [f"{venvs}/trl/bin/python", "-W", "ignore", *map(str, arguments)],
            capture_output=True,
            text=True,
            cwd=cwd,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    return run


@pytest.fixture(scope="module")
def runs(trl, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trl")
    watching = verl_contracts.write(tmp_path_factory.mktemp("watching"), verl_contracts.WATCH)
    masking = verl_contracts.write(tmp_path_factory.mktemp("masking"), BOTH, limit=0.3)
    done = trl(Path(__file__).with_name("trl_runs.py"), watching, masking, folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1]), folder


def test_every_step_is_judged_logged_and_kept(runs):
    found, folder = runs
    lines = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    assert [line["weights"] for line in lines] == [0, 1]
    logged = [entry for entry in found["run"]["log"] if "servanda/active" in entry]
    assert found["run"]["steps"] == len(logged) == 2
    for line, entry in zip(lines, logged, strict=True):
        assert entry["servanda/active"] == entry["servanda/coverage"] == 1.0
        wanted = line["metrics"]["servanda/abs_log_ratio_nats"]
        assert entry["servanda/abs_log_ratio_nats"] == pytest.approx(wanted)
        assert 0 < wanted < 0.1


def test_steps_have_the_number_of_trls_own_log(runs):
    found, folder = runs
    logged = [entry["step"] for entry in found["run"]["log"] if "servanda/active" in entry]
    assert [step.step for step in read_state(folder / "steps.jsonl")] == logged == [1, 2]


def test_rloo_is_judged_by_the_logprobs_that_it_drops(runs):
    found, folder = runs
    logged = [entry for entry in found["rloo"]["log"] if "servanda/active" in entry]
    lines = [json.loads(line) for line in (folder / "rloo.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [entry["step"] for entry in logged] == [1, 2]
    for line, entry in zip(lines, logged, strict=True):
        wanted = line["metrics"]["servanda/abs_log_ratio_nats"]
        assert entry["servanda/abs_log_ratio_nats"] == pytest.approx(wanted)
        assert 0 < wanted < 0.1 and entry["servanda/coverage"] == 1.0
    assert found["rloo"]["no engine"].startswith("TRL samples from the module that it trains")
    assert "RLOO's loss is one of whole responses" in found["rloo"]["acting"]


def test_a_sample_of_the_sequences_has_their_prompts_and_labels(runs):
    found = runs[0]["dump"]
    assert found["steps"] == [1, 2]
    assert found["prompts"] == ["12 + 7 =", "def sum("]
    both = {"rank": ["0"], "replica": ["0"], "engine": ["transformers tiny-lm bfloat16 eager"]}
    tasks = [labels.pop("task") for labels in found["labels"]]
    assert sorted(task for (task,) in tasks) == ["a", "b"]
    assert found["labels"] == [both | {"weight_version": [version]} for version in ("0", "1")]


def test_all_sequences_are_written_or_it_is_an_error(runs):
    found = runs[0]["all"]
    assert (found["step"], found["sequences"]) == (1, 32)
    assert found["error"].startswith("TRL's batch has no logprobs of the trainer")


def test_the_losses_give_the_logprobs_of_a_forward_pass(runs):
    found, folder = runs
    for name, forward in (("steps", False), ("scored", True)):
        run = found["scored" if forward else "run"]
        assert forward == any("servanda/score_seconds_share" in entry for entry in run["log"])
        assert len((folder / f"{name}.jsonl").read_text().splitlines()) == 2
    first, other = (
        json.loads((folder / f"{name}.jsonl").read_text().splitlines()[0])["metrics"]
        for name in ("steps", "scored")
    )
    assert first == pytest.approx(other, rel=1e-3)


def test_an_engine_that_is_not_synced_is_found_in_the_run(runs):
    found, folder = runs
    for name, outcome, cause in (
        ("follows", "inconclusive", ""),
        ("frozen", "violated", "never_synced"),
        ("ignored", "violated", "never_synced"),
    ):
        lines = [json.loads(s) for s in (folder / f"{name}.jsonl").read_text().splitlines()]
        assert [line["follow"]["version"] for line in lines] == [0, 1, 2, 3]
        last = lines[-1]["follow"]
        assert (last["outcome"], last["cause"]) == (outcome, cause)
        assert last["low"] <= (1 if name == "follows" else 0) <= last["high"]
        logged = [e for e in found[name] if "servanda/follow/slope" in e]
        assert len(logged) == 3  # the first sync is the reference
        wanted = lines[-1]["metrics"]["servanda/follow/slope"]
        assert logged[-1]["servanda/follow/slope"] == pytest.approx(wanted)
    adapted = [json.loads(s) for s in (folder / "adapted.jsonl").read_text().splitlines()]
    assert adapted[-1]["follow"]["outcome"] in ("holds", "inconclusive")
    assert abs(adapted[-1]["follow"]["slope"] - 1) < 0.2


@pytest.mark.parametrize(("kind", "steps"), [("rare", [0]), ("often", [0, 0, 1, 1])])
def test_a_generation_is_judged_once_however_often_it_is_learnt_from(runs, kind, steps):
    found, folder = runs
    lines = (folder / f"{kind}.jsonl").read_text().splitlines()
    assert [json.loads(line)["weights"] for line in lines] == steps
    assert found[kind]["steps"] == (4 if kind == "rare" else 2)
    assert sum("servanda/active" in entry for entry in found[kind]["log"]) == len({*steps})
    assert not any("eval_servanda/active" in entry for entry in found[kind]["log"])


def test_a_trainer_without_a_sampler_of_its_own_is_refused(runs):
    assert "TRL samples from the module that it trains (use_vllm=False)" in runs[0]["refused"]


def test_a_trainer_without_an_engine_has_nothing_to_sync(runs):
    assert runs[0]["no engine"].startswith("there is nothing to sync: TRL samples from the module")


def test_the_loss_of_trl_is_that_of_the_declared_weights_and_mask(runs):
    losses = runs[0]["losses"]
    assert len(losses) == 5 * 3 - 1
    wanted = {kind: found["wanted"] for kind, found in losses.items()}
    assert {k: found["loss"] for k, found in losses.items()} == pytest.approx(
        wanted, rel=1e-4, abs=1e-6
    )


@pytest.mark.parametrize("kind", ["healthy", "lora"])
def test_a_healthy_sync_passes_its_drill(runs, kind):
    assert runs[0][kind] == {"outcome": "holds", "cause": "", "exit": 0}


@pytest.mark.parametrize("kind", ["adapter ignored", "tied head"])
def test_a_broken_sync_does_not(runs, kind):
    assert runs[0][kind]["outcome"] == "violated" and runs[0][kind]["exit"] == 1


def test_a_training_script_is_drilled_instead_of_run(runs):
    assert runs[0]["script"] == "holds"


def test_a_script_that_never_trains_is_an_error(runs):
    assert runs[0]["silent"].split("\n")[0].endswith("silent.py never calls GRPOTrainer.train")


def test_a_script_that_fails_before_it_trains_is_an_error(runs):
    first = runs[0]["broken"].split("\n")[0]
    assert first.endswith(
        "broken.py failed before it called train: FileNotFoundError: [Errno 2] No such file or "
        "directory: 'nowhere'"
    )


@pytest.mark.parametrize("name", ["trl_grpo", "trl_preflight"])
def test_an_example_runs_as_it_is_printed(trl, name, tmp_path):
    for folder in ("examples", "models", "data"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    done = trl(f"examples/{name}.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    said = "servanda/active': '1'" if name == "trl_grpo" else "\nHOLDS: "
    assert said in done.stdout


def test_two_ranks_are_judged_as_one_and_stop_together(venvs, tmp_path):
    contract = verl_contracts.write(tmp_path, verl_contracts.HALT, limit=0.2)
    script = Path(__file__).with_name("trl_ranks.py")
    done = subprocess.run(
        [
            *(f"{venvs}/trl/bin/torchrun", "--standalone", "--nproc-per-node", "2"),
            *map(str, (script, contract, tmp_path)),
        ],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert first == second == {"steps": 1, "tokens": 2 * 8 * 8}


@pytest.fixture(scope="module")
def asynchronous(trl, tmp_path_factory):
    folder = tmp_path_factory.mktemp("async")
    watching = verl_contracts.write(tmp_path_factory.mktemp("watching"), verl_contracts.WATCH)
    masking = verl_contracts.write(tmp_path_factory.mktemp("masking"), BOTH, limit=0.3)
    done = trl(Path(__file__).with_name("trl_async_run.py"), watching, masking, folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1]), folder


@pytest.mark.parametrize(("kind", "stale"), [("fresh", [0, 1, 1]), ("late", [0, 1, 2])])
def test_an_asynchronous_step_is_judged_with_the_staleness_at_its_update(asynchronous, kind, stale):
    """TRL drains its queue one step ahead, so the newest weights are one update old."""
    found, folder = asynchronous
    logged = [entry for entry in found[kind] if "servanda/active" in entry]
    assert [entry["step"] for entry in logged] == [1, 2, 3]
    assert [step.step for step in read_state(folder / f"{kind}.jsonl")] == [1, 2, 3]
    assert [entry["servanda/staleness/max"] for entry in logged] == stale
    for entry in logged:
        assert entry["servanda/coverage"] == 1.0 and entry["servanda/observed_sequences"] == 8
    first = json.loads((folder / f"{kind}.jsonl").read_text().splitlines()[0])
    assert len(first["groups"]) == 4  # two prompts, twice
    fresh, *older = (entry["servanda/abs_log_ratio_nats"] for entry in logged)
    assert 0 < fresh < 0.02 < min(older)  # the age is real


def test_an_asynchronous_contract_that_acts_on_tokens_is_refused(asynchronous):
    assert (
        "AsyncGRPOTrainer's loss is computed before a step is judged" in asynchronous[0]["acting"]
    )
