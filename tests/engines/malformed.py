# Replies as no server should give them, made of those that real servers gave.
#
# The oracle looks a number up in the very reply that was read, by the plainest of indexing.

import json
import math
from copy import deepcopy
from dataclasses import dataclass
from functools import cache

import numpy as np
from hypothesis import strategies as st

from servanda.engines.http.dialects import DIALECTS, Server
from servanda.engines.http.dialects.base import SequenceRequest
from servanda.engines.http.engine import trace_of
from servanda.engines.http.responses import Part
from servanda.errors import MeasurementError
from servanda.theory.sampling import Sampling
from servanda.traces.trace import Batch
from tests.engines.replaying import records

VOCABULARY = 1024
NUMBERS = (math.nan, math.inf, -math.inf, -9999.0, -9999, -3.4e38, 1e308, 10**400, -(10**400))
NUMBERS += (-1, 0, 0.0, -0.0, 0.7, 1.0, 1e-7, 5000, 2**31, 2**63, 1.5, -0.25)
OTHERS = (None, True, False, "", "x", "token_id:5", "token_id:-1", "token_id:5000", "-0.5", "NaN")
OTHERS += ([], {}, [1], [[]], [None], {"a": 1}, {"logprob": -0.5}, {"5": -1.0})
NOISE = ("generation_settings", "timings", "bytes", "token", "usage", "text_offset", "text")


@dataclass(frozen=True)
class Case:
    """A recorded reply, and what was asked for."""

    dialect: str
    verb: str
    asked: SequenceRequest
    text: str


@cache
def cases():
    found = []
    for record in [*records("vllm"), *records("llamacpp")]:
        body = record["asked"] or {}
        if "prompt" not in body or body.get("stream") or record["status"] != 200:
            continue
        if not isinstance(body["prompt"], list):
            continue
        reply = json.loads(record["text"])
        sampling = Sampling(temperature=body["temperature"], top_k=body["top_k"] or None)
        if body.get("prompt_logprobs") is not None:
            # the first token as the prompt: every other row is read
            prompt, given = body["prompt"][:1], body["prompt"][1:]
            asked = SequenceRequest(
                tuple(prompt), 1, sampling, 0, tuple(given), best=body["prompt_logprobs"]
            )
            found.append(Case("vllm", "score", asked, _plain(reply)))
            continue
        width = body.get("max_tokens", body.get("n_predict"))
        best = body.get("logprobs", body.get("n_probs"))
        asked = SequenceRequest(tuple(body["prompt"]), width, sampling, body["seed"], best=best)
        dialect = "llamacpp" if "n_probs" in body else "vllm"
        found.append(Case(dialect, "draw", asked, _plain(reply)))
    return found


def _plain(value):
    """Without what no one reads: a mutation there is none."""

    def of(value):
        if isinstance(value, dict):
            return {k: of(v) for k, v in value.items() if k not in NOISE}
        return [of(v) for v in value] if isinstance(value, list) else value

    return json.dumps(of(value))


@st.composite
def malformed(draw):
    """A case and a reply that was tampered with, once to three times."""
    case = draw(st.sampled_from(cases()))
    reply = json.loads(case.text)
    for _ in range(draw(st.integers(1, 3))):
        reply = _changed(draw, reply)
    text = json.dumps(reply)
    last = draw(st.integers(0, 11))
    if last == 0:
        text = text[: draw(st.integers(0, len(text)))]
    elif last == 1:
        at = draw(st.integers(0, len(text)))
        text = (
            text[:at] + draw(st.sampled_from(['"', "{", "]", ",", "-", "0", "\\u0000"])) + text[at:]
        )
    elif last == 2 and text.startswith("{"):
        text = '{"choices": [], ' + text[1:]
    return case, text


def _changed(draw, value):
    """The value with one place in it changed; deep places are met as often as shallow ones."""
    container = isinstance(value, dict | list) and value
    if not container or draw(st.integers(0, 5)) == 0:
        return _another(draw, value)
    keys = [*value] if isinstance(value, dict) else range(len(value))
    key = draw(st.sampled_from(keys))
    value[key] = _changed(draw, value[key])
    return value


def _another(draw, value):
    how = draw(st.integers(0, 7))
    if isinstance(value, list) and value and how < 6:
        at = draw(st.integers(0, len(value) - 1))
        if how == 0:
            return value[:at]
        if how == 1:
            return value[::-1]
        if how == 2:
            return [*value, value[at]]
        if how == 3:
            return [*value[at:], *value[:at]]
        if how == 4:
            return [*value[:at], *value[at + 1 :]]
        return [*value[:at], value[at], *value[at:]]
    if isinstance(value, dict) and value and how < 6:
        key = draw(st.sampled_from([*value]))
        other = draw(st.sampled_from([*value]))
        if how == 0:
            return {k: v for k, v in value.items() if k != key}
        if how == 1:
            return {(f"{k}x" if k == key else k): v for k, v in value.items()}
        if how == 2:
            return {**value, key: value[other], other: value[key]}
        if how == 3:
            return {**value, f"token_id:{draw(st.integers(-1, 1100))}": -0.5}
        if how == 4:
            return {**value, str(draw(st.integers(-1, 1100))): {"logprob": -0.5, "rank": 1}}
        return dict(reversed(value.items()))
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if number and how < 3 and abs(value) < 1e300:
        return value + draw(st.sampled_from([1, -1, 0.5, -0.5]))
    return deepcopy(draw(st.sampled_from([*NUMBERS, *OTHERS])))  # it may be changed again


def read(case, text):
    """The trace of a reply, as the engine makes it; or MeasurementError."""
    dialect = DIALECTS[case.dialect]()
    server = Server("tiny-lm", vocab_size=VOCABULARY, top=20)
    reply = Part.parse(text, "http://127.0.0.1:1", "/endpoint")
    if case.verb == "score":
        answer = dialect.scored(reply, case.asked, server, "prefill")
    else:
        answer = dialect.drawn(reply, case.asked, server)
    batch = Batch((0,), (case.asked.prompt,), case.asked.width)
    return trace_of(batch, [answer], case.asked.best, {})


def told(case, text):
    """What a reply says of position i: its token, and the number of any token there."""
    reply = json.loads(text)
    if case.verb == "score":
        first, rows = len(case.asked.prompt), reply["choices"][0]["prompt_logprobs"]
        return (
            lambda i: case.asked.given[i],
            lambda i: rows[first + i][str(case.asked.given[i])]["logprob"],
            lambda i, token: rows[first + i][str(token)]["logprob"],
        )
    if case.dialect == "vllm":
        choice = reply["choices"][0]
        logprobs = choice["logprobs"]
        return (
            lambda i: choice["token_ids"][i],
            lambda i: logprobs["token_logprobs"][i],
            lambda i, token: logprobs["top_logprobs"][i][f"token_id:{token}"],
        )
    steps = reply["completion_probabilities"]

    def number(entry):
        return math.log(entry["prob"]) if "prob" in entry else entry["logprob"]

    def listed(i, token):
        top = steps[i].get("top_probs") or steps[i]["top_logprobs"]
        [entry] = [e for e in top if e["id"] == token]
        return number(entry)

    return lambda i: reply["tokens"][i], lambda i: number(steps[i]), listed


def refused_or_true(case, text):
    """Whether the reply was refused; where it was not, every number in the trace is its own."""
    try:
        trace = read(case, text)
    except MeasurementError as error:
        assert error.problems[0].hint and "http://127.0.0.1:1/endpoint" in str(error)
        return True
    token_of, own, listed = told(case, text)
    nothing = np.zeros((len(trace.token_N), 0))
    ids_NK, logp_NK = trace.best or (nothing, nothing)
    for i, (token, logp) in enumerate(zip(trace.token_N, trace.columns["logp"], strict=True)):
        if not math.isnan(logp):
            assert token == token_of(i) and logp == own(i) and logp <= 1e-5
        seen = set()
        for other, value in zip(ids_NK[i].tolist(), logp_NK[i].tolist(), strict=True):
            assert (other < 0) == math.isnan(value)
            if other >= 0:
                assert other < VOCABULARY and other not in seen and value == listed(i, other)
                seen.add(other)
    return False
