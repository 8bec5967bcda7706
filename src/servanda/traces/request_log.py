# The traffic log: requests to the infer kernel and its responses, line by line.
#
# Written by the proxy before the kernel: one JSON object per request, in dispatch order, because a
# request counts from its dispatch and not from its response (law 5).  docs/how-to/traffic.md
# documents the fields.
#
# A log of requests to the infer kernel does not show whom stable served, so the proxy also writes a
# line for the first request of each user on a step, by either pool (an assignment).  It stands
# between the lines of requests, and differs from them by its key "pool".

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from servanda.errors import EvidenceError, Where
from servanda.registry import did_you_mean
from servanda.traces.json_fields import (
    LineError,
    check_keys,
    id_of,
    ids_of,
    items,
    json_text,
    labels_of,
    logprob_of,
    name_of,
    number_of,
    parse_line,
    read_lines,
    text_of,
    time_of,
    whole_of,
)

MARK = "pool"  # key of an assignment that a request does not have
FAILOVER, BREAKER = "failover", "breaker"
_POOLS, _CAUSES = ("infer", "stable"), (FAILOVER, BREAKER)
_ASSIGNED = ("run", "leg", "at", "key", MARK, "labels", "prompt_tokens", "because", "apart")
_A_LINE = (
    'an assignment is {"run", "leg", "at", "key", "pool"}, with "pool" infer or stable; see '
    "docs/how-to/traffic.md"
)


@dataclass(frozen=True)
class Assignment:
    """The pool of one user's first request on a step.

    Args:
        at: time of the decision, unix seconds.
        key: keyed hash of the user, or of whatever the split is keyed by.
        pool: the pool that served it, infer or stable.
        prompt_tokens: length of its prompt; None if unknown.
        because: why stable served a request that the split gave to infer: "failover", "breaker";
            "" otherwise.
        apart: why the share of the step does not apply to it, such as a pinned slice; "" if it
            does.
    """

    run: str
    leg: str
    at: float
    key: str
    pool: str
    labels: Mapping[str, str] = field(default_factory=dict)
    prompt_tokens: int | None = None
    because: str = ""
    apart: str = ""

    @property
    def hit(self) -> bool:
        return self.pool == "infer"


def is_assignment(data: Mapping[str, Any]) -> bool:
    """Whether a line is an assignment, and not a request."""
    return MARK in data and "index" not in data


def read_assignments(text: str, file: str) -> tuple[Assignment, ...]:
    """The assignments of one file, in its order; other lines are skipped.

    Raises:
        EvidenceError: invalid lines, each with its place.
    """

    def read(line: str, _: Where) -> Assignment | None:
        if f'"{MARK}"' not in line:  # most lines are requests, which are parsed elsewhere
            return None
        data = parse_line(line, "line")
        return assignment_of(data) if is_assignment(data) else None

    found = read_lines(text, file, read, _A_LINE, EvidenceError, growing=True)
    return tuple(one for one in found if one is not None)


def assignment_of(data: Mapping[str, Any]) -> Assignment:
    """The assignment of one parsed line.

    Raises:
        LineError: not a valid assignment.
    """
    check_keys(data, "an assignment", _ASSIGNED, ("run", "leg", "at", "key", MARK))
    pool, because = data[MARK], text_of(data.get("because"), "'because'")
    if pool not in _POOLS:
        raise LineError(f"'pool' is {json_text(pool)}, and a user is served by infer or stable")
    if because and because not in _CAUSES:
        raise LineError(f"'because' is {json_text(because)}", did_you_mean(because, _CAUSES))
    if because and pool == "infer":
        raise LineError(
            f"'because' is {because!r}, and infer served the request",
            "write it only where stable served a request that the split gave to infer",
        )
    tokens = data.get("prompt_tokens")
    return Assignment(
        run=name_of(data["run"], "'run'"),
        leg=name_of(data["leg"], "'leg'"),
        at=time_of(data["at"]),
        key=name_of(data["key"], "'key'"),
        pool=pool,
        labels=labels_of(data.get("labels")),
        prompt_tokens=None if tokens is None else whole_of(tokens, "'prompt_tokens'"),
        because=because,
        apart=text_of(data.get("apart"), "'apart'"),
    )


def first_of_each_user(
    assignments: Iterable[Assignment], run: str, leg: str
) -> tuple[Assignment, ...]:
    """The first assignment of each user on a step, in the order of the log.

    Later requests of a user follow the same place in the split, so they add no evidence.  A line
    that repeats the first one, of the same time, with the cause "failover" corrects it.
    """
    first: dict[str, Assignment] = {}
    for one in assignments:
        if (one.run, one.leg) != (run, leg):
            continue
        known = first.setdefault(one.key, one)
        if one.because == FAILOVER and one.at == known.at:
            first[one.key] = one
    return tuple(first.values())


_ANSWER = ("token_ids", "logprobs", "best", "finish", "fingerprint")
_ALWAYS = ("index", "run", "leg", "at", "served", "prompt_token_ids", "sampling")
_KNOWN = (*_ALWAYS, *_ANSWER, "labels", "group", "key", "lost")
_FINISHED = ("stop", "length", "stop_string")
OTHER_PROMPT = "answered for another prompt"  # reason of a lost response that the kernel did return
_TRANSFORM = ("temperature", "top_p", "min_p")
_A_ROW = (
    'a line is {"index", "run", "leg", "at", "served", "prompt_token_ids", "sampling"} and either '
    '{"token_ids", "logprobs", "finish"} or {"lost"}; see docs/how-to/traffic.md'
)

Best = tuple[tuple[int, float], ...]  # ids and logprobs of a step's top-k tokens, best first


@dataclass(frozen=True)
class Request:
    """One request that was dispatched.

    Args:
        index: 0, 1, ... within its run and leg, in dispatch order.
        at: dispatch time, unix seconds.
        served: requests sent to infer on this step so far, including this one; more than index + 1
            if only a sample of them is logged.
        sampling: the requested parameters, including max_new_tokens.
        tokens, logp: the response, including its end token; NaN if a logprob is unknown.
        best: the top-k tokens of each step; () if not recorded.
        group: consecutive requests with one value are one prompt group; None: a separate group.
        key: a keyed hash of the user.
        finish: "stop" if the model ended it, "length", or "stop_string" for a stop of the request,
            in which case `tokens` is complete.
        fingerprint: the server's description in this reply; "" if none.
        lost: why there is no response; "" if there is one.
    """

    index: int
    run: str
    leg: str
    at: float
    served: int
    prompt: tuple[int, ...]
    sampling: Mapping[str, Any]
    tokens: tuple[int, ...] = ()
    logp: tuple[float, ...] = ()
    best: tuple[Best, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    group: str | None = None
    key: str = ""
    finish: str = ""
    fingerprint: str = ""
    lost: str = ""
    where: Where | None = field(default=None, compare=False)


def read_served(text: str, file: str) -> tuple[Request, ...]:
    """The requests of one file, in its order; assignments between them are skipped.

    An incomplete last line that is not JSON is still being written: it is left for the next call.

    Raises:
        EvidenceError: invalid lines, each with its place.
    """

    def read(line: str, where: Where) -> Request | None:
        data = parse_line(line)
        return None if is_assignment(data) else request_of(data, where)

    found = read_lines(text, file, read, _A_ROW, EvidenceError, growing=True)
    return tuple(request for request in found if request is not None)


def request_of(data: dict[str, Any], where: Where | None = None) -> Request:
    """The request of one parsed line.

    Raises:
        LineError: not a valid request.
    """
    check_keys(data, "a line", _KNOWN, _ALWAYS)
    index, served = whole_of(data["index"], "'index'"), whole_of(data["served"], "'served'")
    if served <= index:
        raise LineError(
            f"'served' is {served} at index {index}: the infer kernel received this request and "
            f"the {index} before it",
            "count every request that was sent to the infer kernel on this step, this one included",
        )
    request = Request(
        index=index,
        run=name_of(data["run"], "'run'"),
        leg=name_of(data["leg"], "'leg'"),
        at=time_of(data["at"]),
        served=served,
        prompt=ids_of(data["prompt_token_ids"], "'prompt_token_ids'"),
        sampling=_sampling(data["sampling"]),
        labels=labels_of(data.get("labels")),
        group=_group(data.get("group")),
        key=text_of(data.get("key"), "'key'"),
        where=where,
    )
    return _lost(request, data) if data.get("lost") is not None else _answered(request, data)


def unanswered(data: dict[str, Any], why: str) -> dict[str, Any]:
    """The line of the same request without its response."""
    return {**{key: value for key, value in data.items() if key not in _ANSWER}, "lost": why}


def _lost(request: Request, data: dict[str, Any]) -> Request:
    answer = [key for key in _ANSWER if data.get(key) is not None]
    if answer:
        raise LineError(
            f"'lost' and {answer[0]!r} cannot both be there",
            "a request has a response, or a reason for having none",
        )
    return replace(request, lost=name_of(data["lost"], "'lost'"))


def _answered(request: Request, data: dict[str, Any]) -> Request:
    for key in ("token_ids", "logprobs", "finish"):
        if data.get(key) is None:
            raise LineError(f"{key!r} is missing", 'write "lost": "timeout" where none came back')
    tokens = ids_of(data["token_ids"], "'token_ids'")
    logp = tuple(logprob_of(v, f"logprobs[{i}]") for i, v in items(data["logprobs"], "'logprobs'"))
    if len(logp) != len(tokens):
        raise LineError(f"{len(tokens)} 'token_ids' have {len(logp)} 'logprobs'")
    most = request.sampling["max_new_tokens"]
    if len(tokens) > most:
        raise LineError(
            f"{len(tokens)} tokens answer a request for at most {most}",
            "write sampling.max_new_tokens as it was asked for",
        )
    finish = text_of(data["finish"], "'finish'")
    if finish not in _FINISHED:
        raise LineError(
            f"'finish' is {finish!r}, and a response ends by 'stop', 'length' or 'stop_string'",
            f'write "lost": "{finish or "cut"}" for a response that was cut off',
        )
    return replace(
        request,
        tokens=tokens,
        logp=logp,
        best=_best(data.get("best"), tokens, logp),
        finish=finish,
        fingerprint=text_of(data.get("fingerprint"), "'fingerprint'"),
    )


def _best(value: Any, tokens: tuple[int, ...], logp: tuple[float, ...]) -> tuple[Best, ...]:
    if value is None:
        return ()
    steps = [_step(step, f"best[{i}]") for i, step in items(value, "'best'")]
    if len(steps) != len(tokens):
        raise LineError(f"{len(tokens)} 'token_ids' have {len(steps)} lists of 'best'")
    for i, (pairs, token, own) in enumerate(zip(steps, tokens, logp, strict=True)):
        if len(pairs) != len(steps[0]):
            raise LineError(
                f"best[{i}] lists {len(pairs)} tokens, and best[0] {len(steps[0])}",
                "list the k likeliest at every step; remove the sampled token where the server "
                "adds it",
            )
        for other, value in pairs:
            # unknown in one place only is no contradiction
            if other == token and value != own and value == value and own == own:
                raise LineError(
                    f"best[{i}] says {value:g} for the sampled token {token}, and logprobs[{i}] "
                    f"{own:g}"
                )
    known = ([pair for pair in pairs if pair[1] == pair[1]] for pairs in steps)
    return tuple(tuple(sorted(pairs, key=lambda pair: (-pair[1], pair[0]))) for pairs in known)


def _step(value: Any, place: str) -> list[tuple[int, float]]:
    pairs: dict[int, float] = {}
    for i, pair in items(value, place):
        at = f"{place}[{i}]"
        if not isinstance(pair, list) or len(pair) != 2:
            raise LineError(f"{at} is {json_text(pair)}, not [token id, logprob]")
        token = id_of(pair[0], at)
        if token in pairs:
            raise LineError(f"{place} lists the token id {token} twice")
        pairs[token] = logprob_of(pair[1], at)
    return [*pairs.items()]


def _sampling(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise LineError(f"'sampling' is {json_text(value)}, not an object")
    most = value.get("max_new_tokens")
    if most is None:
        raise LineError(
            "'sampling' has no max_new_tokens",
            "write the number that the request asked for, or the server's limit where it gave none",
        )
    if whole_of(most, "sampling.max_new_tokens") < 1:
        raise LineError("sampling.max_new_tokens is 0: the request asks for no token")
    for name in _TRANSFORM:
        if value.get(name) is not None:
            number_of(value[name], f"sampling.{name}")
    for name in ("top_k", "seed"):
        number = value.get(name)
        if number is not None and (isinstance(number, bool) or not isinstance(number, int)):
            raise LineError(f"sampling.{name} is {json_text(number)}, not a whole number")
    return value


def _group(value: Any) -> str | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise LineError(f"'group' is {json_text(value)}, not a text")
    return str(value)
