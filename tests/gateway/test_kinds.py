# Servers of other kinds behind a gateway, as fakes that speak as their sources have it.
#
# A real llama-server is asked in tests/real.  SGLang runs nowhere here: its fake is written from
# its source of September 2026.

import asyncio
import dataclasses
import json
import time

import pytest

from servanda.gateway.proxy.config import Limits, Upstream
from servanda.gateway.proxy.gateway import PromptTokens
from servanda.gateway.proxy.pools.upstreams import Server
from servanda.gateway.proxy.request import CompletionRequest
from tests.clock import WAIT_S
from tests.gateway.serving import (
    NOBODY,
    Fake,
    Running,
    config,
    everything,
    reply,
    rows,
    snapshot,
    stream,
)

COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "ab"}]


def asked(path, **more):
    said = {"messages": MESSAGES} if path == CHAT else {"prompt": "ab"}
    return {**said, "max_tokens": 8, **more}


def before(infer, stable=None, dialect="llamacpp"):
    """A gateway before a server of another kind, and a stable of vLLM's."""
    made = config(infer, stable, controller=NOBODY, without="infer")
    other = dataclasses.replace(made.infer, dialect=dialect, best=2)
    return Running(dataclasses.replace(made, infer=other))


def listed(token, logp):
    likely = [{"id": token + i, "token": "x", "logprob": logp - i} for i in range(2)]
    return {"id": token, "token": "x", "logprob": logp, "top_logprobs": likely}


def llama(prompt=(1, 2), counted=None, pages=None):
    """A script of llama-server: its template writes <u>, and its tokenizer gives these ids."""

    def told(request):
        body = request.json
        if request.target == "/apply-template":
            return {"prompt": "<u>" + body["messages"][0]["content"]}
        if request.target == "/tokenize":
            if pages is not None:
                pages.append(body)
            return {"tokens": [*prompt] if "content" in body else []}
        steps = [listed(7, -0.5), listed(3, -0.25)]
        choice = {"index": 0, "finish_reason": "stop"}
        if request.target == CHAT:
            choice["message"] = {"role": "assistant", "content": "x"}
        else:
            choice |= {"text": "x", "logprobs": None}
        if body.get("logprobs"):
            choice["logprobs"] = {"content": steps}
        usage = {"completion_tokens": 2, "prompt_tokens": counted or len(prompt)}
        return {"choices": [choice], "usage": usage}

    async def script(request, writer):
        await reply(told(request))(request, writer)

    return script


def tokenizing(tokens):
    """A stable whose /tokenize says these ids."""

    async def script(request, writer):
        known = {"count": len(tokens), "tokens": tokens} if request.target == "/tokenize" else {}
        await reply(known)(request, writer)

    return script


@pytest.mark.parametrize("path", [COMPLETION, CHAT])
def test_a_sampled_answer_of_llama_server_is_a_row_with_the_prompt_that_it_says(path):
    pages = []
    with Fake(llama(pages=pages)) as infer, before(infer) as running:
        running.gateway.take(snapshot(whole=everything(sample=1.0)))
        told = running.client.post(path, json=asked(path)).json()

        (row,) = rows(running)
        assert row["prompt_token_ids"] == [1, 2] and row["token_ids"] == [7, 3]
        assert row["best"] == [[[7, -0.5], [8, -1.5]], [[3, -0.25], [4, -1.25]]]
        text = "<u>ab" if path == CHAT else "ab"
        # as the text of a request is read
        assert pages == [{"content": text, "add_special": True, "parse_special": True}]
        running.gateway.take(snapshot(whole=everything(sample=0.0), version=2))
        assert told == running.client.post(path, json=asked(path)).json()


@pytest.mark.parametrize(
    ("counted", "stable", "seen", "lost"),
    [
        (None, [1, 2], "equal", None),
        (None, None, "unknown", None),
        (None, [1, 9], "other", "answered for another prompt"),
        (5, [1, 2], "other", "answered for another prompt"),
        (5, None, "other", "answered for another prompt"),
    ],
)
def test_the_prompt_of_llama_server_is_held_against_its_number_and_stables(
    counted, stable, seen, lost
):
    with (
        Fake(llama(counted=counted)) as infer,
        Fake(tokenizing(stable) if stable else reply({})) as other,
        before(infer, other) as running,
    ):
        running.gateway.take(snapshot(whole=everything(sample=1.0)))
        running.client.post(COMPLETION, json=asked(COMPLETION)).raise_for_status()

        (row,) = rows(running)
        assert row.get("lost") == lost and row["prompt_token_ids"] in ([1, 2], stable)
        assert running.gateway.counts.prompts == {seen: 1}


def test_an_answer_whose_prompt_nobody_can_tell_is_lost():
    async def script(request, writer):
        known = llama() if request.target == COMPLETION else reply({}, status=404)
        await known(request, writer)

    with Fake(script) as infer, before(infer) as running:
        running.gateway.take(snapshot(whole=everything(sample=1.0)))
        running.client.post(COMPLETION, json=asked(COMPLETION)).raise_for_status()

        (row,) = rows(running)
        assert row["lost"] == "without the prompt's ids" and row["x-prompt"] == "unknown"


def test_llama_server_counts_tokens_of_texts_and_chats_and_of_nothing_else():
    asks = [(COMPLETION, {}), (CHAT, {}), (COMPLETION, {"prompt": ["a", "b"]})]

    async def counted(url):
        server = Server("infer", Upstream(url, dialect="llamacpp"), time.monotonic)
        await server.open()
        tokens = PromptTokens(Limits(count_s=WAIT_S), lambda: server)
        made = [
            CompletionRequest(json.dumps(asked(path, **more)).encode(), path == CHAT)
            for path, more in asks
        ]
        found = [await tokens.count(one) for one in made]
        await server.close()
        return found

    with Fake(llama(prompt=(1, 2, 3))) as infer:
        assert asyncio.run(counted(infer.url)) == [3, 3, None]


def of_sglang(path, streams):
    """What SGLang sends with what was asked for beside, and without it."""
    logprobs = {"tokens": ["a", "b"], "token_logprobs": [-0.5, -0.25], "top_logprobs": [{}, {}]}
    steps = [
        {"token": name, "logprob": v, "top_logprobs": []}
        for name, v in zip("ab", (-0.5, -0.25), strict=True)
    ]
    last = {"index": 0, "finish_reason": "stop", "matched_stop": "b"}
    ids = {"token_ids": [7, 3], "prompt_token_ids": [1, 2]}
    if not streams:
        said = {"message": {"role": "assistant", "content": "a"}} if path == CHAT else {"text": "a"}
        shown = {"content": steps} if path == CHAT else logprobs
        plain = {"choices": [{**last, **said, "logprobs": None}]}
        return [{"choices": [{**last, **said, **ids, "logprobs": shown}]}], [plain]
    if path == COMPLETION:
        word = {"index": 0, "text": "a", "finish_reason": None, "matched_stop": None}
        full = {**word, **ids, "logprobs": logprobs}
        end = {**last, "text": "", "logprobs": None}
        return (
            [{"choices": [full]}, {"choices": [end]}],
            [{"choices": [{**word, "logprobs": None}]}, {"choices": [end]}],
        )
    word = {"index": 0, "delta": {"content": "a"}, "finish_reason": None, "matched_stop": None}
    held = {**word, "delta": {}, "logprobs": {"content": steps[1:]}}
    full = [{**word, "logprobs": {"content": steps[:1]}}, held]
    end = {**last, "delta": {}, "logprobs": None}
    framed = {"choices": [], "usage": None, "sglext": {"input_ids": [1, 2], "output_ids": [[7, 3]]}}
    return (
        [*({"choices": [one]} for one in full), {"choices": [end]}, framed],
        [{"choices": [{**word, "logprobs": None}]}, {"choices": [end]}],
    )


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("path", [COMPLETION, CHAT])
def test_a_sampled_answer_of_sglang_is_a_row_and_reads_as_one_that_was_not(path, streams):
    full, plain = of_sglang(path, streams)
    events = [f"data: {json.dumps(one)}\n\n".encode() for one in full] + [b"data: [DONE]\n\n"]
    script = stream(*events) if streams else reply(full[0])
    with Fake(script) as infer, before(infer, dialect="sglang") as running:
        running.gateway.take(snapshot(whole=everything(sample=1.0)))
        told = running.client.post(path, json=asked(path, stream=streams, stop="b")).text

        found = [line.removeprefix("data: ") for line in told.split("\n\n") if line]
        assert [json.loads(one) for one in found if one != "[DONE]"] == plain
        (row,) = rows(running)
        assert row["prompt_token_ids"] == [1, 2] and row["token_ids"] == [7, 3]
        assert row["logprobs"] == [-0.5, -0.25] and row["finish"] == "stop_string"
        assert "best" not in row and row["x-best"] == 0
