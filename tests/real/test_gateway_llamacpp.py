# A real llama-server behind `servanda serve`: what users get of it, and what is evidence.

import json
import subprocess
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest
from scripts import servers
from scripts.servers import MODEL

from tests.gateway.running import until
from tests.real.serving import needs_engines
from tests.real.test_gateway_vllm import DOMAINS, PROMPTS, counted, gateway

pytestmark = needs_engines

# it draws by filters of its own unless it is told otherwise
NEUTRAL = ("--temp", "1", "--top-k", "0", "--top-p", "1", "--min-p", "0", "--jinja")
TEXT = {"prompt": "The list of ", "max_tokens": 8, "seed": 5}
CHAT = {"messages": [{"role": "user", "content": "The list of "}], "max_tokens": 8, "seed": 5}
COMPLETION, CHATS = "/v1/completions", "/v1/chat/completions"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def llama_url(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llamacpp")
    gguf, port = folder / "tiny-lm.gguf", servers.free_port()
    subprocess.run(servers.gguf_command(gguf, "f32"), check=True)
    command = servers.llama_command(port, gguf, *NEUTRAL)
    with servers.running(command, port, folder / "log") as url:
        yield url


@pytest.fixture(scope="module")
def stable(serving_kernel):
    return serving_kernel(f"transformers:{MODEL}")


ASKED = [
    (COMPLETION, TEXT, ""),
    (COMPLETION, {**TEXT, "stream": True}, ""),
    (COMPLETION, {**TEXT, "logprobs": 2}, ""),
    (COMPLETION, {**TEXT, "logprobs": 2, "stream": True}, ""),
    (COMPLETION, {**TEXT, "n": 2}, ""),
    (COMPLETION, {**TEXT, "max_tokens": None}, ""),
    (COMPLETION, {**TEXT, "stop": ["e"]}, "stop"),
    (CHATS, CHAT, ""),
    (CHATS, {**CHAT, "max_tokens": None}, ""),
    (CHATS, {**CHAT, "logprobs": True, "top_logprobs": 2}, ""),
    (CHATS, {**CHAT, "stream": True}, "answered without token ids"),
    (CHATS, {**CHAT, "tools": [TOOL]}, "tools"),
]


def normal(value):
    """Without ids, times, and the last digits of logprobs, which a cached prefix moves."""
    if isinstance(value, dict):
        left_out = ("created", "timings", "prompt_tokens_details")
        kept = {name: one for name, one in value.items() if name not in left_out}
        if isinstance(kept.get("id"), str):  # of a reply, and not of a token
            del kept["id"]
        return {name: normal(one) for name, one in kept.items()}
    if isinstance(value, list):
        return [normal(one) for one in value]
    return round(value, 3) if isinstance(value, float) else value


def read(text):
    if not text.startswith("data: "):
        return [normal(json.loads(text))]
    events = [one.removeprefix("data: ") for one in text.strip().split("\n\n")]
    return [one if one == "[DONE]" else normal(json.loads(one)) for one in events]


def test_a_sampled_reply_is_the_one_of_llama_server_but_for_ids_and_times(
    llama_url, stable, tmp_path
):
    with gateway(tmp_path, llama_url, stable, defaults="") as (_, url, say):
        for path, body, _ in ASKED:
            alone, told = (
                httpx2.post(at + path, json={"model": "tiny-lm", **body}, timeout=60)
                for at in (llama_url, url)
            )
            assert alone.status_code == 200
            assert read(told.text) == read(alone.text), (path, body)
        counts = counted(say, len(ASKED) + 1)  # one more asked who serves
    assert counts["unsampled"] == {no: 1 for _, _, no in ASKED if no}
    # stable has no chat template, and reads the texts of completions as llama-server does
    assert set(counts["prompts"]) == {"equal", "unknown"}


def test_what_llama_server_draws_is_scored_and_keeps_the_contract(llama_url, stable, tmp_path):
    lines = [line for line in PROMPTS if line["labels"]["domain"] == DOMAINS[0]]
    with gateway(tmp_path, llama_url, stable, defaults="") as (_, url, say):

        def ask(number):
            line = lines[number % len(lines)]
            body = {"model": "tiny-lm", "prompt": line["prompt"], "user": f"u{number % 9}"}
            body |= {"metadata": line["labels"], "stream": number % 2 == 0}
            httpx2.post(url + COMPLETION, json=body, timeout=60).raise_for_status()

        with ThreadPoolExecutor(4) as pool:
            assert len([*pool.map(ask, range(60))]) == 60
        found = {}

        def scored():
            found.update({one["name"]: one for one in say()["slices"]})
            return found[f"domain={DOMAINS[0]}"]["scored"] >= 50

        until(scored, "evidence")
        standing = say()
    assert found[f"domain={DOMAINS[0]}"]["status"] == "active"
    assert standing["scoring"]["missing"] <= 6, standing["scoring"]
