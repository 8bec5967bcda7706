# Faults injected into table kernels, and the kernel that has to pass, without a process.

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from servanda.authoring.fault_injection import FaultCheck, fault_checks, share_caught, valid
from servanda.cli.main import main
from servanda.engines.faults import FAULTS
from servanda.engines.table import TableEngine
from servanda.errors import ContractError, Interrupted
from servanda.runner import fault_drill, run
from tests import kit
from tests.engines.faults.test_catalogue import ON_TABLES

CONTRACT = """\
apiVersion: servanda.dev/v1alpha1
kind: KernelContract
metadata: {name: toy}
kernels:
  train: {engine: table, model: p.json}
  infer: {engine: table, model: q.json}
workload:
  prompts: prompts.jsonl
  round: 32
  sampling: {max_new_tokens: 4, seed: 1}
claim: realised
statistical:
  - {id: tv, metric: tv, aggregate: mean, at_most: 0.05, slices: all}
  - {id: tail, metric: abs_log_ratio_nats, aggregate: p90, at_most: 0.3, slices: all}
observability:
  clauses:
    - {id: fidelity, metric: sampler_fidelity}
    - {id: finite, metric: valid_ratio, at_least: 0.99}
promotion: {offline: {prompt_groups: [32, 1600]}}
"""
LOOSE = CONTRACT.replace("at_most: 0.05", "at_most: 0.9").replace("at_most: 0.3", "at_most: 15")
TESTS = """\
apiVersion: servanda.dev/v1alpha1
kind: ContractTest
metadata: {name: toy-tests}
contract: toy.kernelcontract.yaml
seed: 3
cases:
  - {name: nothing yet, traffic: "0x64", expect: [{after: 0, verdict: VERDICT}]}
"""


def written(folder, contract=CONTRACT, tv=0.01, verdict="inconclusive"):
    kit.table(folder, "p.json", {"": kit.BASE})
    kit.table(folder, "q.json", {"": kit.moved(kit.BASE, tv)})
    (folder / "prompts.jsonl").write_text("".join(f'{{"prompt": "{text}"}}\n' for text in "abc"))
    (folder / "toy.kerneltest.yaml").write_text(TESTS.replace("VERDICT", verdict))
    path = folder / "toy.kernelcontract.yaml"
    path.write_text(contract)
    return run.load(path)


def checks_of(contract, *names, **options):
    return [*fault_checks(contract, names, **{"open": run.in_process, **options})]


def fates(checks):
    return {check.fault: check.fate for check in checks if check.fault}


@pytest.fixture(scope="module")
def every(tmp_path_factory):
    contract = written(tmp_path_factory.mktemp("every"))
    return contract, checks_of(contract, *FAULTS)


# what is caught


def test_every_fault_has_the_fate_of_its_drill(every):
    contract, checks = every
    assert [*fates(checks)] == [*FAULTS]
    for one in checks[2:]:
        if one.fault not in ON_TABLES:
            assert one.fate == "not applicable"
            assert "cannot be injected into TableEngine" in one.why
            continue
        drilled = fault_drill.drill(contract, one.fault, open=run.in_process)
        assert (one.outcome, one.by) == (drilled.outcome, drilled.deciding)
        expected = {"violated": "caught", "refused": "caught", "holds": "missed", "error": "caught"}
        assert one.fate == expected[drilled.outcome], one.fault
    assert share_caught(checks)[1] == len(ON_TABLES)


def test_the_ways_of_being_caught(every):
    _, checks = every
    caught = {check.fault: check for check in checks if check.fate == "caught"}
    assert caught["permuted_ids"].outcome == "refused"
    assert "the tokenizers differ" in caught["permuted_ids"].why
    assert str(caught["off_by_one_shift"]) == (
        "✓ off_by_one_shift: caught, violated: tv on all, tail on all"
    )
    # a precondition of the contract stops it: the check exits 4, and no gate lets it pass
    assert str(caught["lost_sequences"]) == "✓ lost_sequences: caught, error: finite on all"
    missed = next(check for check in checks if check.fate == "missed")
    assert str(missed) == f"✗ {missed.fault}: missed, holds"


def test_a_contract_that_catches_nothing_is_not_valid(tmp_path):
    checks = checks_of(written(tmp_path, LOOSE), "lost_top_token", "undisclosed_min_p")
    assert [*fates(checks).values()] == ["missed", "missed"]
    assert (share_caught(checks), valid(checks)) == ((0, 2), False)


@pytest.mark.parametrize(
    ("found", "answer", "of_every"),
    [
        (["passes", "caught"], True, True),
        (["passes", "caught", "missed"], True, False),
        (["passes", "caught", "not applicable"], True, False),
        (["passes", "caught", "open"], True, None),
        (["passes", "missed", "open"], None, False),
        (["passes", "undecided"], False, False),
        (["passes", "not applicable"], None, False),
        (["fails"], False, False),
        (["open"], None, None),
        (["passes", "fails", "caught"], True, True),  # infer fails, and the copy of train passes
    ],
)
def test_valid_is_a_kernel_that_passes_and_a_fault_that_is_caught(found, answer, of_every):
    plain = ("passes", "fails")
    checks = [FaultCheck("" if f in plain or found == ["open"] else "x", "", f) for f in found]
    assert (valid(checks), valid(checks, every=True)) == (answer, of_every)


# a kernel that has to pass


class Unsteady(TableEngine):
    """What it scores hangs on the batch that it scores it in."""

    def score(self, batch, sampling, path):
        trace = super().score(batch, sampling, path)
        rng = np.random.default_rng([len(batch), *batch.sequence_S])
        noise_N = rng.normal(0, 0.3, len(trace.token_N))
        trace.columns["logp"][:] = np.minimum(trace.columns["logp"] + noise_N, -1e-3)
        return trace


def test_the_train_kernel_passes_with_itself_and_the_contract_holds(every):
    _, (itself, own, *_) = every
    assert (itself.fate, itself.kernels) == ("passes", "table p.json against itself")
    assert str(own) == "✓ no fault, table q.json against table p.json: passes, holds"


@pytest.mark.slow
def test_a_contract_below_the_noise_floor_is_not_valid_and_no_fault_is_injected(tmp_path):
    checks = checks_of(written(tmp_path), "permuted_ids", open=lambda kernel, _: Unsteady(kernel))
    (itself,) = checks
    assert (itself.fate, valid(checks)) == ("fails", False)
    assert "tv on all" in str(itself) and "below the noise floor" in str(itself)


def test_sizes_that_are_too_small_are_refused_and_no_kernel_is_run(tmp_path):
    text = CONTRACT.replace("prompt_groups: [32, 1600]", "prompt_groups: [8, 8]")
    with pytest.raises(ContractError, match="even identical kernels would need at least"):
        checks_of(written(tmp_path, text.replace("round: 32", "round: 8")), open=None)


def test_faults_are_injected_beside_train_where_infer_is_broken_without_one(tmp_path):
    """Else every fault would seem to be caught."""
    checks = checks_of(written(tmp_path, tv=0.2), "off_by_one_shift", "lost_top_token")
    assert [check.outcome for check in checks[:2]] == ["holds", "violated"]
    assert {check.kernels for check in checks[2:]} == {"table p.json against itself"}
    assert fates(checks) == {"off_by_one_shift": "caught", "lost_top_token": "missed"}
    assert valid(checks)


def test_a_recording_cannot_be_its_own_candidate(tmp_path):
    """It answers nothing new, so the contract as it is says whether a good kernel passes."""
    contract = written(tmp_path)
    train = contract.kernels.train.model_copy(update={"engine": "recorded"})
    kernels = contract.kernels.model_copy(update={"train": train})

    def open_(kernel, side):
        return run.in_process(kernel.model_copy(update={"engine": "table"}), side)

    own, fault = checks_of(
        contract.model_copy(update={"kernels": kernels}), "permuted_ids", open=open_
    )
    assert (own.fate, fault.fate) == ("passes", "caught")


# time, and Ctrl-C


def test_faults_that_the_time_does_not_allow_are_open(tmp_path):
    seen = []
    checks = checks_of(
        written(tmp_path),
        "permuted_ids",
        "off_by_one_shift",
        watch=lambda progress: seen.append(str(progress)),
        deadline=lambda: any("permuted_ids, loading the kernels" in text for text in seen),
    )
    assert fates(checks) == {"permuted_ids": "caught", "off_by_one_shift": "open"}
    assert valid(checks) and valid(checks, every=True) is None
    checks = checks_of(written(tmp_path), "permuted_ids", deadline=lambda: True)
    assert [check.fate for check in checks] == ["open"] and valid(checks) is None


def test_ctrl_c_ends_it(tmp_path):
    def interrupt(kernel, side):
        raise Interrupted("stopped")

    with pytest.raises(Interrupted):
        checks_of(written(tmp_path), "permuted_ids", open=interrupt)


# the command


def call(*arguments):
    return CliRunner().invoke(main, ["contract", "test", *map(str, arguments)])


@pytest.mark.slow
def test_faults_are_printed_as_text_and_as_json(tmp_path):
    written(tmp_path)
    words = (tmp_path, "--faults", "--fault", "permuted_ids")

    done = call(*words)
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines()[-1] == "valid: 1 of 1 faults caught"
    assert "no fault, loading the kernels ..." in done.stderr

    (found,) = json.loads(call(*words, "--format", "json", "--quiet").stdout)
    assert (found["contract"], found["valid"], found["caught"]) == ("toy", True, 1)
    assert [check["fate"] for check in found["checks"]] == ["passes", "passes", "caught"]


@pytest.mark.slow
def test_a_fault_that_is_missed_exits_1_and_a_kernel_that_cannot_be_opened_4(tmp_path):
    written(tmp_path, LOOSE)
    words = (tmp_path, "--faults", "--fault", "undisclosed_min_p", "--quiet")
    done = call(*words)
    assert done.exit_code == 1
    assert done.stdout.splitlines()[-1] == "NOT VALID, a fault is missed: 0 of 1 faults caught"
    (tmp_path / "q.json").write_text("{}")
    done = call(*words)
    assert done.exit_code == 4 and "q.json" in done.output


def test_tests_that_fail_are_printed_and_no_kernel_runs(tmp_path):
    written(tmp_path, verdict="violated")
    done = call(tmp_path, "--faults")
    assert done.exit_code == 1
    assert "✗ nothing yet" in done.output and "caught" not in done.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--fault", "int4"], "--fault goes with --faults"),
        (["--max-time", "1m"], "--max-time goes with --faults"),
        (["--faults", "--fault", "int8"], "there is no fault 'int8'"),
        (["--faults", "--format", "junit"], "--faults prints text or json, not junit"),
    ],
)
def test_a_wrong_call_says_what_is_wrong(tmp_path, arguments, message):
    written(tmp_path)
    done = call(tmp_path, *arguments)
    assert done.exit_code == 2 and message in done.output


# real kernels


@pytest.mark.slow
def test_real_kernels_pass_without_a_fault_and_not_with_one():
    examples = Path(__file__).parents[2] / "examples"
    contract = run.load(examples / "tiny-faults.kernelcontract.yaml")
    checks = [*fault_checks(contract, ["int4", "lost_top_token", "permuted_ids"])]
    assert [check.outcome for check in checks] == (
        ["holds", "holds", "violated", "violated", "refused"]
    )
    assert valid(checks, every=True)
