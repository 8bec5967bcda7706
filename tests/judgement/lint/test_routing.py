# What is said of a routing that contradicts itself, or that could never act.

import pytest

from servanda.errors import ContractError
from tests.kit import parse

SMALL = """\
apiVersion: servanda.dev/v1alpha1
kind: KernelContract
metadata: {name: small}
kernels: {train: {engine: table}, infer: {engine: table}}
stable: {engine: table}
workload: {prompts: p.jsonl}
statistical:
  - {id: tv, metric: tv, aggregate: mean, at_most: 1e-3}
"""
CONTRACT = f"""\
{SMALL}escalation:
  - {{when: {{clause: tv, is: violated}}, do: [{{divert: slice}}]}}
routing:
  mode: enforce
  stable_in_flight: 64
"""


def said(text):
    with pytest.raises(ContractError) as caught:
        parse(text, "x.yaml", engines=["table", "openai_http"])
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


SERVERS = """\
  train: {engine: openai_http, url: "http://t"}
  infer: {engine: openai_http, url: "http://i"}
"""
SERVED = CONTRACT.replace(
    "kernels: {train: {engine: table}, infer: {engine: table}}\n", f"kernels:\n{SERVERS}"
)


def with_replicas(*lines, text=CONTRACT):
    return "\n".join([f"{text}  replicas:", *(f"    {line}" for line in lines), ""])


def test_replicas_are_servers_with_weights():
    contract, _ = parse(
        with_replicas('infer: [{url: "http://a/v1", weight: 2}, {url: "http://b"}]'),
        "x.yaml",
        engines=["table"],
    )

    infer = contract.routing.replicas.infer
    assert infer is not None and contract.routing.replicas.stable is None
    assert [(one.url, one.weight) for one in infer] == [("http://a/v1", 2.0), ("http://b", 1.0)]


@pytest.mark.parametrize("url", ["10.0.0.5:8000", "ftp://a", "http://a?x=1", "http://me:key@a"])
def test_a_replica_is_at_the_address_of_a_server(url):
    first, *_, hint = said(with_replicas(f'infer: [{{url: "{url}"}}]'))

    assert first == f"x.yaml:15:19: '{url}' is not the address of a server"
    assert hint == "  hint: write url: http://HOST:PORT; a key is named by key_env of the kernel"


def test_a_server_is_named_once():
    assert said(with_replicas('infer: [{url: "http://a"}, {url: "http://a/v1"}]')) == [
        "x.yaml:15:38: 'http://a/v1' is a replica of infer already",
        '   15 |     infer: [{url: "http://a"}, {url: "http://a/v1"}]',
        "                                             ^",
        "  hint: remove one of the two; `weight: 2` gives a server a double share",
    ]
    assert said(with_replicas('infer: [{url: "http://a"}]', 'stable: [{url: "http://a"}]'))[0] == (
        "x.yaml:16:20: 'http://a' is a replica of infer already"
    )
    assert said(with_replicas('stable: [{url: "http://i"}]', text=SERVED))[0] == (
        "x.yaml:17:20: 'http://i' is the url of infer already"
    )


def test_the_reference_scorer_is_no_replica():
    first, *_, hint = said(with_replicas('infer: [{url: "http://t"}]', text=SERVED))

    message = "'http://t' is the server of kernels.train, and the reference scorer serves no users"
    assert first == f"x.yaml:17:19: {message}"
    assert hint == "  hint: name another server, or remove it"


def test_replicas_of_stable_need_a_stable_kernel():
    text = CONTRACT.replace("stable: {engine: table}\n", "").replace("enforce", "observe")
    text = text.replace("divert: slice", "page: me")
    found = said(with_replicas('stable: [{url: "http://a"}]', text=text))

    assert found[0] == "x.yaml:14:5: stable has replicas, and there is no stable: kernel"
    assert found[-1] == ("  hint: declare stable: with the kernel that they run, or remove them")


@pytest.mark.parametrize(
    ("line", "found", "hint"),
    [
        (
            'infer: [{url: "http://a", weight: 0}]',
            "x.yaml:15:39: a weight of 0 gives a server no requests",
            "write a weight above 0, or remove the replica",
        ),
        (
            'infer: [{url: "http://a", weight: -1}]',
            "x.yaml:15:39: a weight of -1 gives a server no requests",
            "write a weight above 0, or remove the replica",
        ),
        (
            "infer: []",
            "x.yaml:15:12: the replicas of infer are none",
            "name a server, or remove the key: the kernel's url serves then",
        ),
        (
            'inferr: [{url: "http://a"}]',
            "x.yaml:15:5: replicas has no key 'inferr'",
            "did you mean 'infer'?",
        ),
        ("infer: [{weight: 1}]", "x.yaml:15:13: replica needs the key 'url'", "add url: ..."),
    ],
)
def test_what_is_no_list_of_replicas_is_refused_where_it_stands(line, found, hint):
    lines = said(with_replicas(line))
    assert (lines[0], lines[-1]) == (found, f"  hint: {hint}")
