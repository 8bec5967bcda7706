# Faults injected into table kernels, and the kernel that has to pass, without a process.

import numpy as np
import pytest

from servanda.authoring.mutation.report import render
from servanda.authoring.mutation.run import mutate
from servanda.engines.faults import FAULTS
from servanda.engines.table import TableEngine
from servanda.errors import ContractError, MeasurementError
from servanda.runner import fault_drill, run
from tests.authoring.mutation import made
from tests.engines.faults.test_catalogue import ON_TABLES

LOOSE = made.CONTRACT.replace("at_most: 0.05", "at_most: 0.9").replace(
    "at_most: 0.1", "at_most: 0.9"
)
LOOSE = LOOSE.replace("at_most: 0.3", "at_most: 15")


def contract_of(folder, text=made.CONTRACT, **kernels):
    return made.written(folder, contract=text, **kernels)[0].contract


def faults_of(contract, *names, **options):
    options = {"open": run.in_process} | options
    return mutate(contract, only="faults", faults=names, **options)


@pytest.fixture(scope="module")
def every(tmp_path_factory):
    contract = contract_of(tmp_path_factory.mktemp("every"))
    return contract, faults_of(contract)


# what is caught


def test_every_fault_has_the_fate_of_its_drill(every):
    contract, found = every

    for one in found.faults:
        if one.fault not in ON_TABLES:
            assert one.fate == "not applicable"
            assert "cannot be injected into TableEngine" in one.why
            continue
        told = fault_drill.drill(contract, one.fault, open=run.in_process)
        assert (one.outcome, one.by) == (told.outcome, told.deciding)
        fates = {"violated": "caught", "refused": "caught", "holds": "missed", "error": "caught"}
        assert one.fate == fates[told.outcome], one.fault


def test_a_fault_that_does_not_fit_the_engines_does_not_count(every):
    _, found = every
    assert len(found.faults) == len(FAULTS)
    assert found.counts()[1] == len(ON_TABLES)
    assert "not applicable to these engines: mask_contamination, attention_window" in render(found)


def test_the_ways_of_being_caught(every):
    _, found = every
    caught = {f.fault: f for f in found.faults if f.fate == "caught"}

    assert caught["permuted_ids"].outcome == "refused"
    assert "the tokenizers differ" in caught["permuted_ids"].why
    assert caught["off_by_one_shift"].by == ("tv on all", "tail on all")
    # a precondition of the contract stops it: the check exits 4, and no gate lets it pass
    assert (caught["lost_sequences"].outcome, caught["lost_sequences"].by) == (
        "error",
        ("finite on all",),
    )


def test_a_missed_fault_names_the_cell_that_came_nearest(every):
    _, found = every
    missed = {f.fault: f for f in found.faults if f.fate == "missed"}

    assert missed
    for one in missed.values():
        assert 0 <= one.near.part < 1
        assert f"{one.fault:<23}  missed" in render(found)
        assert f"holds; nearest: {one.near}" in " ".join(render(found).split())


def test_named_faults_are_injected_in_the_order_of_the_catalogue(tmp_path):
    found = faults_of(contract_of(tmp_path), "undisclosed_top_p", "permuted_ids")

    assert [f.fault for f in found.faults] == ["permuted_ids", "undisclosed_top_p"]
    assert (found.score, found.exit_code(1.0)) == (1.0, 0)


def test_a_fault_that_is_none_is_refused_before_anything_is_measured(tmp_path):
    with pytest.raises(MeasurementError, match="there is no fault 'top_p'"):
        faults_of(contract_of(tmp_path), "top_p", open=None)


def test_a_contract_that_catches_nothing_is_toothless_by_name(tmp_path):
    contract = contract_of(tmp_path, LOOSE)

    found = faults_of(contract, "lost_top_token", "undisclosed_min_p")

    assert (found.counts(), found.toothless, found.exit_code()) == ((0, 2), ("faults",), 1)
    assert "TOOTHLESS: no fault is caught; nearest came " in render(found)


def test_a_contract_may_be_toothless_for_limits_and_not_for_faults(tmp_path):
    tests = made.written(tmp_path, cases=made.GOOD)

    found = mutate(tests[0].contract, tests, faults=["off_by_one_shift"], open=run.in_process)

    assert (found.toothless, found.wholly_toothless, found.exit_code()) == (("limits",), False, 0)
    assert "TOOTHLESS for limits, not for faults: no case notices" in render(found)


# a kernel that has to pass


class Unsteady(TableEngine):
    """What it scores hangs on the batch that it scores it in."""

    nats = 0.3

    def score(self, batch, sampling, path):
        trace = super().score(batch, sampling, path)
        rng = np.random.default_rng([len(batch), *batch.sequence_S])
        noise_N = rng.normal(0, self.nats, len(trace.token_N))
        trace.columns["logp"][:] = np.minimum(trace.columns["logp"] + noise_N, -1e-3)
        return trace


def unsteady(kernel, side):
    return Unsteady(kernel)


def a_little_unsteady(kernel, side):
    engine = Unsteady(kernel)
    engine.nats = 0.06
    return engine


def test_the_train_kernel_keeps_a_good_contract_with_itself(every):
    _, found = every

    assert found.itself.holds and found.own.holds
    assert found.itself.kernels == "table p.json against itself"
    assert found.own.kernels == found.faulty == "table q.json against table p.json"
    assert "✓ without a fault: table p.json against itself: holds, all 7 cells, " in render(found)


@pytest.mark.slow
def test_a_contract_below_the_floor_is_unsatisfiable_by_name(tmp_path):
    found = faults_of(contract_of(tmp_path), open=unsteady)

    assert (found.unsatisfiable, found.faults, found.exit_code()) == (True, (), 1)
    failing = {f.cell: f for f in found.itself.failing}
    assert failing["tv on all"].where.line == 15
    assert "limit 0.05; the limit is below the floor" in failing["tv on all"].why
    assert (
        "UNSATISFIABLE: a kernel that is right does not pass: table p.json against itself"
        in render(found)
    )


def test_a_contract_whose_sizes_are_too_small_is_unsatisfiable_and_no_kernel_is_run(tmp_path):
    text = made.CONTRACT.replace("prompt_groups: [32, 1600]", "prompt_groups: [8, 8]")
    text = text.replace("round: 32", "round: 8")

    found = faults_of(contract_of(tmp_path, text), open=None)

    assert (found.unsatisfiable, found.exit_code()) == (True, 1)
    assert found.itself.outcome == "out of reach"
    assert found.itself.failing[0].cell == "tv on all"
    assert "even identical kernels would need at least 82 tokens" in found.itself.failing[0].why
    assert "even identical kernels would need" in " ".join(render(found).split())


def test_a_size_that_ends_undecided_is_said(tmp_path):
    text = made.CONTRACT.replace("prompt_groups: [32, 1600]", "prompt_groups: [32, 32]")

    found = faults_of(contract_of(tmp_path, text), open=a_little_unsteady)

    assert found.unsatisfiable
    small = [f.why for f in found.itself.failing if "below the floor" not in f.why]
    assert small
    assert all("too small a size: open after 32 prompt groups" in why for why in small)


def test_faults_are_injected_beside_train_where_infer_is_broken_without_one(tmp_path):
    """Else every fault would seem to be caught."""
    broken = {"": made.kit.moved(made.kit.BASE, 0.2)}
    contract = contract_of(tmp_path, q=broken)

    found = faults_of(contract, "off_by_one_shift", "lost_top_token")

    assert (found.itself.outcome, found.own.outcome) == ("holds", "violated")
    assert found.faulty == "table p.json against itself"
    fates = {f.fault: f.fate for f in found.faults}
    assert fates == {"off_by_one_shift": "caught", "lost_top_token": "missed"}
    assert not found.unsatisfiable


def test_a_recording_cannot_be_its_own_candidate(tmp_path):
    """It answers nothing new, so the contract as it is says whether a good kernel passes."""
    contract = contract_of(tmp_path)
    train = contract.kernels.train.model_copy(update={"engine": "recorded"})
    kernels = contract.kernels.model_copy(update={"train": train})

    def open_(kernel, side):
        return run.in_process(kernel.model_copy(update={"engine": "table"}), side)

    found = faults_of(contract.model_copy(update={"kernels": kernels}), "permuted_ids", open=open_)

    assert found.itself is None and found.own.holds
    assert found.conforming is found.own


def test_tokens_of_a_trainer_cannot_be_measured(tmp_path):
    contract = contract_of(tmp_path)
    workload = contract.workload.model_copy(update={"source": "trainer", "prompts": ""})

    with pytest.raises(ContractError, match="come from a trainer as it runs"):
        faults_of(contract.model_copy(update={"workload": workload}))


# cost, time, and Ctrl-C


def test_the_cost_is_said_before_the_first_fault(tmp_path):
    said = []

    def watch(progress):
        said.append(progress.what)

    faults_of(contract_of(tmp_path), "permuted_ids", watch=watch, say=said.append)

    at = next(i for i, text in enumerate(said) if text.startswith("1 fault, a check each: about "))
    assert "at most about" in said[at]
    assert {text.partition(":")[0] for text in said[:at]} == {"no fault"}
    assert {text.partition(":")[0] for text in said[at + 1 :]} == {"faults", "permuted_ids"}


def test_faults_that_the_time_does_not_allow_are_open_and_leave_the_score_open(tmp_path):
    said = []

    found = faults_of(
        contract_of(tmp_path),
        "permuted_ids",
        "off_by_one_shift",
        "undisclosed_top_p",
        watch=lambda progress: said.append(progress.what),
        deadline=lambda: "permuted_ids: loading the kernels" in said,
    )

    assert [f.fate for f in found.faults] == ["caught", "open", "open"]
    assert (found.stopped, found.open) == ("time", 2)
    assert [found.exit_code(wanted) for wanted in (None, 0.3, 0.9)] == [0, 0, 3]
    assert render(found).endswith("faults 1 of 1; the time was over for 2 more")


def test_a_check_that_the_time_ends_says_nothing_of_the_contract(tmp_path):
    found = faults_of(contract_of(tmp_path), "permuted_ids", deadline=lambda: True)

    assert (found.unsatisfiable, found.exit_code()) == (False, 3)
    assert [f.fate for f in found.faults] == ["open"]


def test_ctrl_c_keeps_what_was_found(tmp_path):
    opened = []

    def open_(kernel, side):
        opened.append(side)
        if len(opened) > 6:  # two checks without a fault, and one fault
            raise KeyboardInterrupt
        return run.in_process(kernel, side)

    found = faults_of(contract_of(tmp_path), "permuted_ids", "off_by_one_shift", open=open_)

    assert [f.fault for f in found.faults] == ["permuted_ids"]
    assert (found.stopped, found.exit_code()) == ("interrupted", 130)
    assert render(found).endswith("faults 1 of 1; interrupted before the rest")
