# Lint of the routing: consistency of its numbers, and requirements for acting.

from __future__ import annotations

from collections.abc import Iterator, Mapping

from servanda.contract.fields import duration_text
from servanda.contract.finding import Finding
from servanda.contract.model import Contract, Kernel, base_of
from servanda.contract.policy import Replica
from servanda.judgement.lint.kernels import URL
from servanda.registry import quoted


def routing(contract: Contract) -> Iterator[Finding]:
    """Check for contradictions, and for rules that can never act."""
    rule = contract.routing
    declared = "without_snapshot" in rule.model_fields_set
    if declared and rule.without_snapshot == "stable" and contract.stable is None:
        message = "without a snapshot traffic goes to stable, and there is no stable: kernel"
        hint = "declare stable:, or write without_snapshot: infer"
        yield Finding(("routing", "without_snapshot"), message, hint)
    yield from _replicas(contract)
    yield from _order(contract)
    if contract.routing.mode == "enforce":
        yield from _enforced(contract)


def _replicas(contract: Contract) -> Iterator[Finding]:
    """Check the servers of the pools: each serves one pool, and the reference scorer none."""
    given, kernels = contract.routing.replicas, contract.kernels
    pools: tuple[tuple[str, tuple[Replica, ...] | None, Kernel | None], ...] = (
        ("infer", given.infer, kernels.infer),
        ("stable", given.stable, contract.stable),
    )
    train = base_of(kernels.train.url or "")
    seen: dict[str, str] = {}
    for pool, replicas, kernel in pools:
        at = ("routing", "replicas", pool)
        if replicas is None:
            if kernel is not None and kernel.url is not None:
                seen.setdefault(base_of(kernel.url), f"the url of {pool}")
            continue
        if kernel is None:
            hint = "declare stable: with the kernel that they run, or remove them"
            yield Finding(at, "stable has replicas, and there is no stable: kernel", hint, key=True)
        if not replicas:
            hint = "name a server, or remove the key: the kernel's url serves then"
            yield Finding(at, f"the replicas of {pool} are none", hint)
        for i, replica in enumerate(replicas):
            if replica.weight <= 0:
                hint = "write a weight above 0, or remove the replica"
                message = f"a weight of {replica.weight:g} gives a server no requests"
                yield Finding((*at, i, "weight"), message, hint)
            url, base = quoted(replica.url), base_of(replica.url)
            message = hint = ""
            if URL.fullmatch(replica.url) is None or "@" in replica.url:
                message = f"{url} is not the address of a server"
                hint = "write url: http://HOST:PORT; a key is named by key_env of the kernel"
            elif base == train:
                message = f"{url} is the server of kernels.train, and the reference scorer serves "
                message += "no users"
                hint = "name another server, or remove it"
            elif base in seen:
                message = f"{url} is {seen[base]} already"
                hint = "remove one of the two; `weight: 2` gives a server a double share"
            if message:
                yield Finding((*at, i, "url"), message, hint)
            seen.setdefault(base, f"a replica of {pool}")


def _order(contract: Contract) -> Iterator[Finding]:
    """Check the order of pairs of a minimum and a maximum."""
    rule = contract.routing
    if rule.sample > rule.sample_near:
        message = f"while all is well {rule.sample:g} is re-scored, and only {rule.sample_near:g} "
        message += "where a decision is near"
        hint = f"write sample_near: {rule.sample:g} or more, or a smaller sample"
        yield Finding(("routing", _written(contract, "sample", "sample_near")), message, hint)
    if rule.dwell > rule.longest_dwell:
        dwell, longest = duration_text(rule.dwell), duration_text(rule.longest_dwell)
        message = f"a slice stays away for {dwell} at least, and for {longest} at most"
        hint = f"write longest_dwell: {dwell} or more, or a shorter dwell"
        yield Finding(("routing", _written(contract, "dwell", "longest_dwell")), message, hint)


def _written(contract: Contract, first: str, second: str) -> str:
    """The field, of two, that the contract contains."""
    return first if first in contract.routing.model_fields_set else second


def _enforced(contract: Contract) -> Iterator[Finding]:
    """To act, routing needs a stable kernel, its capacity, and a rule with a diversion."""
    at = ("routing", "mode")
    if contract.stable is None:
        message = "enforce takes traffic to stable, and there is no stable: kernel"
        hint = "declare stable: with the kernel that serves when infer may not, or observe"
        yield Finding(at, message, hint)
        return
    if contract.routing.stable_in_flight is None:
        message = "enforce diverts nothing while no one says how much stable can answer"
        hint = "write stable_in_flight: with the requests that it can answer at a time"
        yield Finding(at, message, hint)
    actions = [action for rule in contract.escalation for action in rule.do]
    if not any(isinstance(action, Mapping) and "divert" in action for action in actions):
        message = "enforce diverts nothing: no rule of escalation asks for it"
        hint = "add {when: {clause: ID, is: violated}, do: [{divert: slice}]}"
        yield Finding(at, message, hint)
