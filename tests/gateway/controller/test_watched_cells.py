# What of a contract routing watches, and what it refuses to follow.

import re

import pytest

from servanda.errors import ContractError
from servanda.gateway.controller.watched_cells import select_cells
from servanda.runner.load import load
from tests import kit
from tests.gateway.controller import controllers
from tests.kit import parse


def watched(folder, **more):
    path, _ = kit.write(folder, **{"slices": controllers.SLICES, "q": controllers.NEARLY, **more})
    return select_cells(load(path))


def test_slices_that_are_known_before_the_request_are_watched(tmp_path):
    slices = (
        "slices: [{name: first, split: labels.first}, "
        "{name: long, match: {request.prompt_tokens: {gte: 2}}}]"
    )
    found = watched(tmp_path, slices=slices)
    names = ["all", "first=a", "first=b", "first=c", "long"]
    assert [w.slice for w in found.watched if not w.refutes] == names
    assert [w.slice for w in found.draws] == names
    assert not found.left_out


def test_a_slice_of_contexts_is_left_out_with_the_reason(tmp_path):
    found = watched(tmp_path, slices="slices: [{name: late, match: {context.position: {gte: 2}}}]")
    assert {w.slice for w in found.watched} == {"all"}
    (left,) = found.left_out
    assert (left.clause, left.slice) == ("tv", "late")
    assert left.why == "context.position is not known before the request"


def test_a_limit_relative_to_stable_is_left_out(tmp_path):
    more = "  - {id: beside, metric: tv, aggregate: mean, at_most: {times: 2, of: stable}}\n"
    found = watched(tmp_path, more=more)
    assert {left.clause for left in found.left_out} == {"beside"}
    assert {left.why for left in found.left_out} == {
        "its limit is relative to a value of the stable or train kernel"
    }


def test_a_mean_without_a_bound_is_left_out_for_nothing_would_bring_its_slice_back(tmp_path):
    """The language refuses it in a file, and a contract that Python made is none."""
    more = "  - {id: k3, metric: k3_nats, aggregate: mean, at_most: 0.1, clip: 2}\n"
    path, _ = kit.write(tmp_path, slices=controllers.SLICES, more=more)
    contract = load(path)
    assert not select_cells(contract).left_out
    tv, k3 = contract.statistical
    unbounded = contract.model_copy(
        update={"statistical": (tv, k3.model_copy(update={"clip": None}))}
    )
    found = select_cells(unbounded)
    assert {cell.clause for cell in found.watched} == {"tv", "sampler_fidelity"}
    assert {left.why for left in found.left_out} == {
        "its mean is unbounded, so the return test could never pass"
    }


@pytest.mark.parametrize("claim", ["population", "realised"])
def test_a_request_is_a_prompt_group_whatever_is_claimed(tmp_path, claim):
    found = watched(tmp_path, claim=claim, samples=4)
    assert {cell.claim for cell in found.by_name.values()} == {"population"}
    assert {cell.capacity for cell in found.by_name.values()} == {
        6
    }  # max_new_tokens, of one answer


def test_rules_say_what_is_diverted_and_who_is_paged(tmp_path):
    more = (
        "  - {id: worst, metric: tv, aggregate: p90, at_most: 0.9, severity: critical}\n"
        "escalation:\n"
        "  - {when: {clause: tv, is: violated}, do: [{divert: slice}, {page: oncall}]}\n"
        "  - {when: {clause: worst, is_not: holds}, do: [{divert: all}]}\n"
        "  - {when: {clause: tv, is: inconclusive}, do: [{page: no one}]}\n"
    )
    by_clause = {w.clause: w for w in watched(tmp_path, more=more).watched}
    assert (by_clause["tv"].diverts, by_clause["tv"].pages) == ("slice", ("oncall",))
    assert (by_clause["worst"].diverts, by_clause["worst"].pages) == ("all", ())
    assert (by_clause["tv"].critical, by_clause["worst"].critical) == (False, True)


def test_without_any_rule_it_is_shown_what_a_divert_would_do(tmp_path):
    assert {w.diverts for w in watched(tmp_path).watched} == {"slice"}


def test_a_rule_that_diverts_nothing_leaves_the_others_without_a_divert(tmp_path):
    more = "escalation: [{when: {clause: tv, is: violated}, do: [{divert: slice}]}]\n"
    other = "  - {id: far, metric: k3_nats, aggregate: mean, at_most: 1, clip: 5}\n"
    by_clause = {w.clause: w.diverts for w in watched(tmp_path, more=other + more).watched}
    assert by_clause == {"tv": "slice", "far": "", "sampler_fidelity": "slice"}


def test_how_tokens_are_drawn_has_the_name_and_the_rules_of_the_contracts_own_clause(tmp_path):
    rules = (
        "escalation:\n"
        "  - {when: {clause: drawn, is: violated}, do: [{divert: all}, {page: oncall}]}\n"
        "  - {when: {clause: tv, is: violated}, do: [{page: kernels}]}\n"
    )
    guards = "observability: {clauses: [{id: drawn, metric: sampler_fidelity}]}\n"
    found = watched(tmp_path, more=rules + guards)
    assert {cell.clause for cell in found.draws} == {"drawn"}
    assert {(cell.diverts, cell.pages) for cell in found.draws} == {("all", ("oncall", "kernels"))}


def test_a_referee_that_is_an_arm_is_refused(tmp_path):
    path, _ = kit.write(tmp_path)
    path.write_text(path.read_text().replace("q.json", "p.json"))
    with pytest.raises(ContractError, match="one kernel: the reference scorer must not"):
        select_cells(load(path))


SERVERS = """\
apiVersion: servanda.dev/v1alpha1
kind: KernelContract
metadata: {{name: servers}}
kernels:
  train: {{engine: openai_http, url: "{train}"}}
  infer: {{engine: openai_http, url: "http://infer:8000"}}
stable: {{engine: openai_http, url: "http://stable:8000/v1"}}
workload: {{prompts: p.jsonl}}
statistical:
  - {{id: tv, metric: tv, aggregate: mean, at_most: 0.05}}
"""


@pytest.mark.parametrize(
    ("train", "says"),
    [
        (
            "http://stable:8000",
            "5:37: kernels.train and stable are one server: the reference scorer must",
        ),
        ("http://infer:8000/v1/", "5:10: kernels.train and kernels.infer are one kernel: the"),
    ],
)
def test_a_referee_on_a_server_of_users_is_refused(train, says):
    """It would serve them, and be asked for the logprobs of prompts while it does."""
    contract, _ = parse(SERVERS.format(train=train), "x.yaml", engines=["openai_http"])
    with pytest.raises(ContractError, match=re.escape(says)):
        select_cells(contract)


def test_a_contract_of_which_nothing_can_be_watched_is_refused(tmp_path):
    path, _ = kit.write(tmp_path)
    path.write_text(path.read_text().replace("at_most: 0.05", "at_most: 0.05, mode: monitor"))
    with pytest.raises(ContractError, match="no statistical clause of toy can be watched"):
        select_cells(load(path))
