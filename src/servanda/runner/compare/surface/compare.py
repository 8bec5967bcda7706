# Two servers on the same texts and chats, layer by layer, before any statistics.
#
# Token ids on both sides bypass tokenizers, templates and parsers, so a comparison of kernels
# cannot detect the usual faults of server upgrades.

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import TypeVar

from servanda.runner.compare.surface.cases import CONVERSATIONS, TEXTS, TOOL_PROMPTS
from servanda.runner.compare.surface.dialects import Client, Rendered
from servanda.runner.compare.surface.difference import Layer, LayerResult

T = TypeVar("T")

_HEAD = 6  # token ids per side in the text of a first difference


def compare_layers(a: Client, b: Client, texts: Sequence[str] = ()) -> Iterator[LayerResult]:
    """Every layer above the kernel, one finding each, the lowest first.

    Args:
        texts: texts of the workload, in addition to the built-in ones.

    Raises:
        MeasurementError: a server does not respond, or not like its kind.
    """
    yield LayerResult("servers", "same", f"{a.title} · {b.title}")
    yield _defaults(a, b)
    plain = [*TEXTS, *texts]
    yield _same_ids("tokenizer", "texts", plain, Client.encoded, (a, b), repr)
    name = attrgetter("name")
    yield _same_ids("chat template", "chats", CONVERSATIONS, Client.rendered, (a, b), name)
    yield _tool_calls(a, b)


def _defaults(a: Client, b: Client) -> LayerResult:
    """Compare the default sampling parameters."""
    defaults = {client.name: client.defaults() for client in (a, b)}
    silent = [name for name, values in defaults.items() if values is None]
    if silent:
        who = f"{silent[0]} tells" if len(silent) == 1 else "A and B tell"
        text = f"{who} no sampling defaults; all are sent here"
        return LayerResult("defaults", "unknown", text, fails=False)
    mine, theirs = defaults[a.name] or {}, defaults[b.name] or {}
    odd = [key for key in sorted({*mine, *theirs}) if mine.get(key) != theirs.get(key)]
    if not odd:
        return LayerResult("defaults", "same", "equal sampling defaults; every one is sent here")
    named = "; ".join(f"{key} {mine.get(key, 'none')} and {theirs.get(key, 'none')}" for key in odd)
    text = f"other sampling defaults: {named}. Clients that name none are served otherwise"
    return LayerResult("defaults", "differs", text, fails=False)


def _same_ids(
    layer: Layer,
    what: str,
    cases: Sequence[T],
    ask: Callable[[Client, T], Rendered],
    clients: tuple[Client, Client],
    describe: Callable[[T], str],
) -> LayerResult:
    """Whether both servers make the same prompt ids of each case."""
    same = counted = 0
    refused: dict[str, str] = {}
    first = ""
    for case in cases:
        mine, theirs = (ask(client, case) for client in clients)
        for client, rendering in zip(clients, (mine, theirs), strict=True):
            if rendering.refused:
                refused.setdefault(client.name, f"{describe(case)}: {rendering.refused}")
        if mine.refused and theirs.refused:
            continue  # neither can: no difference for clients
        alike = mine.count == theirs.count
        if mine.ids is not None and theirs.ids is not None:
            counted += 1
            alike = mine.ids == theirs.ids
        if alike and not mine.refused and not theirs.refused:
            same += 1
        elif not first:
            first = _difference(describe(case), mine, theirs, clients)
    total = len(cases)
    if len(refused) == 2 and not first and not same:
        text = "; ".join(f"{name} refuses {refusal}" for name, refusal in refused.items())
        return LayerResult(layer, "unknown", text)
    how = "prompt ids" if counted else "numbers of prompt tokens (ids are not told)"
    if first:
        return LayerResult(layer, "differs", f"{how} of {same} of {total} {what} are equal", first)
    both = total - same
    besides = f", {both} refused by both" if both else ""
    return LayerResult(layer, "same", f"{how} of {same} of {total} {what} are equal{besides}")


def _difference(case: str, mine: Rendered, theirs: Rendered, clients: tuple[Client, Client]) -> str:
    """The first difference of two renderings."""
    sides = zip(clients, (mine, theirs), strict=True)
    if mine.refused or theirs.refused:
        refusals = (f"{d.name} refuses it ({r.refused})" if r.refused else "" for d, r in sides)
        return f"{case}: {', '.join(filter(None, refusals))}"
    if mine.ids is None or theirs.ids is None:
        return f"{case}: {mine.count} tokens and {theirs.count}"
    pairs = enumerate(zip(mine.ids, theirs.ids, strict=False))
    at = next((i for i, (x, y) in pairs if x != y), min(len(mine.ids), len(theirs.ids)))
    heads = (f"{d.name} {[*(r.ids or ())][at : at + _HEAD]} of {r.count}" for d, r in sides)
    return f"{case}: from token {at} on, {', '.join(heads)}"


def _tool_calls(a: Client, b: Client) -> LayerResult:
    """Whether the responses of both contain valid tool calls."""
    calls = {client.name: [client.called(chat) for chat in TOOL_PROMPTS] for client in (a, b)}
    # a server without tool support refuses each of them
    refused = {
        name: answers[0].refused if all(answer.refused for answer in answers) else ""
        for name, answers in calls.items()
    }
    sound = {name: sum(answer.calls > 0 for answer in answers) for name, answers in calls.items()}
    total = len(TOOL_PROMPTS)
    if all(refused.values()):
        return LayerResult("tool calls", "unknown", f"both refuse tools: {refused[a.name]}")
    counts = [
        f"{name} {'refuses tools' if refused[name] else f'{calls} of {total}'}"
        for name, calls in sound.items()
    ]
    text = f"answers with calls that parse: {', '.join(counts)}"
    if any(refused.values()):
        first = next(refusal for refusal in refused.values() if refusal)
        return LayerResult("tool calls", "differs", text, first)
    odd = [w for answers in calls.values() for answer in answers for w in answer.wrong]
    pairs = [(bool(x.calls), bool(y.calls)) for x, y in zip(*calls.values(), strict=True)]
    if not any(x or y for x, y in pairs) and not odd:
        return LayerResult("tool calls", "unknown", "the model calls no tool on either server")
    if all(x == y for x, y in pairs) and not odd:
        return LayerResult("tool calls", "same", text)
    at = next((i for i, (x, y) in enumerate(pairs) if x != y), 0)
    first = odd[0] if odd else f"{TOOL_PROMPTS[at].name}: only one of them calls a tool"
    return LayerResult("tool calls", "differs", text, first)
