# What is said of a routing that contradicts itself, or that could never act.

import pytest

from servanda.errors import ContractError
from tests.kit import parse

CONTRACT = """\
apiVersion: servanda.dev/v1alpha1
kind: KernelContract
metadata: {name: small}
kernels: {train: {engine: table}, infer: {engine: table}}
stable: {engine: table}
workload: {prompts: p.jsonl}
statistical:
  - {id: tv, metric: tv, aggregate: mean, at_most: 1e-3}
escalation:
  - {when: {clause: tv, is: violated}, do: [{divert: slice}]}
routing:
  mode: enforce
  stable_in_flight: 64
"""


def said(text):
    with pytest.raises(ContractError) as caught:
        parse(text, "x.yaml", engines=["table"])
    return str(caught.value).splitlines()


def test_a_routing_that_can_act_is_sound():
    contract, _ = parse(CONTRACT, "x.yaml", engines=["table"])

    assert contract.routing.mode == "enforce"


def test_nobody_enforces_without_a_kernel_to_divert_to():
    text = CONTRACT.replace("stable: {engine: table}\n", "").replace("divert: slice", "page: me")

    assert said(text) == [
        "x.yaml:11:9: enforce takes traffic to stable, and there is no stable: kernel",
        "   11 |   mode: enforce",
        "                ^",
        "  hint: declare stable: with the kernel that serves when infer may not, or observe",
    ]


def test_nobody_enforces_without_room_at_stable_that_somebody_measured():
    assert said(CONTRACT.replace("  stable_in_flight: 64\n", "")) == [
        "x.yaml:12:9: enforce diverts nothing while no one says how much stable can answer",
        "   12 |   mode: enforce",
        "                ^",
        "  hint: write stable_in_flight: with the requests that it can answer at a time",
    ]


@pytest.mark.parametrize("do", ["hold", "{page: me}"])
def test_nobody_enforces_without_a_rule_that_diverts(do):
    assert said(CONTRACT.replace("{divert: slice}", do)) == [
        "x.yaml:12:9: enforce diverts nothing: no rule of escalation asks for it",
        "   12 |   mode: enforce",
        "                ^",
        "  hint: add {when: {clause: ID, is: violated}, do: [{divert: slice}]}",
    ]


@pytest.mark.parametrize("missing", ["  stable_in_flight: 64\n", "stable: {engine: table}\n"])
def test_who_only_observes_needs_none_of_it(missing):
    text = CONTRACT.replace("mode: enforce", "mode: observe").replace("divert: slice", "page: me")

    contract, _ = parse(text.replace(missing, ""), "x.yaml", engines=["table"])

    assert contract.routing.mode == "observe"


def test_where_a_decision_is_near_no_less_is_scored_than_while_all_is_well():
    assert said(f"{CONTRACT}  sample: 0.5\n") == [
        "x.yaml:14:11: while all is well 0.5 is re-scored, and only 0.2 where a decision is near",
        "   14 |   sample: 0.5",
        "                  ^",
        "  hint: write sample_near: 0.5 or more, or a smaller sample",
    ]
    assert said(f"{CONTRACT}  sample_near: 0.001\n")[0] == (
        "x.yaml:14:16: while all is well 0.01 is re-scored, and only 0.001 where a decision is near"
    )


def test_the_longest_dwell_is_no_shorter_than_the_first():
    assert said(f"{CONTRACT}  dwell: 2h\n  longest_dwell: 90m\n") == [
        "x.yaml:14:10: a slice stays away for 2h at least, and for 90m at most",
        "   14 |   dwell: 2h",
        "                 ^",
        "  hint: write longest_dwell: 2h or more, or a shorter dwell",
    ]


def test_a_route_lives_longer_than_nothing():
    """Or every one has ended as it comes, and stable serves all that slices act on."""
    assert said(f"{CONTRACT}  expires: 0s\n")[0] == (
        "x.yaml:14:12: expires must be greater than 0, found 0.0"
    )
