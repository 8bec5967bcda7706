# A real vLLM behind `servanda serve`: what users get of it, what is evidence, and what is found.

import json
import re
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx2
import openai
import pytest
from scripts import servers
from scripts.servers import MODEL, ROOT

from tests.gateway.openai_calls import CALLS, outcome
from tests.gateway.running import Program, until
from tests.real.serving import needs_engines

pytestmark = needs_engines

PROMPTS = [json.loads(line) for line in (ROOT / "data" / "prompts.jsonl").read_text().splitlines()]
DOMAINS = sorted({line["labels"]["domain"] for line in PROMPTS})
COLD, SWAPPED, SOUND = DOMAINS[:3]
CONTRACT = f"""\
apiVersion: servanda.dev/v1alpha1
kind: KernelContract
metadata: {{name: real}}
kernels:
  train: {{engine: transformers, model: "{MODEL}", batch_size: 16}}
  infer: {{engine: openai_http, url: "INFER"DEFAULTS}}
stable: {{engine: openai_http, url: "STABLE"}}
workload: {{prompts: "{ROOT}/data/prompts.jsonl", sampling: {{max_new_tokens: 16}}}}
labels: {{domain: {{from: request.metadata.domain}}}}
slices: [{{name: domain, split: labels.domain}}]
statistical:
  - {{id: tv, metric: tv, aggregate: mean, at_most: 0.04, slices: [domain]}}
escalation:
  - {{when: {{clause: tv, is: violated}}, do: [{{divert: slice}}, {{page: oncall}}]}}
routing: {{mode: enforce, stable_in_flight: 64, min_users: 5, enter_evidence: 100, dwell: 1h,
  scorer_utilisation: 10, sample: 1.0, sample_near: 1.0, most_diverted: 0.6}}
"""


class Proxy(BaseHTTPRequestHandler):
    """Before the server: it draws one domain colder, and answers another one's wrong question."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self._pass(httpx2.get(self.server.url + self.path))

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        domain = (body.get("metadata") or {}).get("domain")
        if domain == COLD:
            body["temperature"] = 0.3
        if domain == SWAPPED:
            body["prompt"] = "an answer from a stale cache: "
        self._pass(httpx2.post(self.server.url + self.path, json=body, timeout=60))

    def _pass(self, reply):
        self.send_response(reply.status_code)
        self.send_header("content-type", reply.headers.get("content-type", "text/plain"))
        self.send_header("content-length", str(len(reply.content)))
        self.end_headers()
        self.wfile.write(reply.content)

    def log_message(self, *_):
        pass


@contextmanager
def proxied(url):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
    server.url = url
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


DECLARED = ", sampling_defaults: {temperature: 1.0}"


@contextmanager
def gateway(folder, infer, stable, *more, defaults=DECLARED):
    """`servanda serve` before these servers: its process, its url, and what its leader says."""
    text = CONTRACT.replace("INFER", infer).replace("STABLE", stable).replace("DEFAULTS", defaults)
    (folder / "real.kernelcontract.yaml").write_text(text)
    words = ("serve", "real.kernelcontract.yaml", "--port", 0, "--admin", "127.0.0.1:0")
    with Program(*words, "--show-pool", *more, cwd=folder) as serving:
        page = serving.line(r"page (http://\S+)")[1].rstrip("/")
        url = serving.line(r"serving users at (http://\S+)/v1")[1]
        keys = (folder / "runs" / "real-gateway" / "keys.yaml").read_text()
        key = re.search(r"key: \"?([\w-]+)", keys)[1]

        def standing():
            head = {"authorization": f"Bearer {key}"}
            return httpx2.get(f"{page}/v1/status", headers=head).raise_for_status().json()

        until(lambda: _served_by(url) == "infer", "infer serves")
        yield serving, url, standing
        assert serving.end() == 0


def _served_by(url):
    body = {"model": "tiny-lm", "max_tokens": 1, "temperature": 0.5, **TEXT}
    return httpx2.post(f"{url}/v1/completions", json=body, timeout=60).headers["x-servanda-pool"]


@pytest.fixture(scope="module")
def vllm_url(tmp_path_factory):
    """A vLLM that takes chats and tools, too: the model's folder has no template of its own."""
    port, folder = servers.free_port(), tmp_path_factory.mktemp("vllm")
    template = folder / "template.jinja"
    template.write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    tools = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    command = servers.vllm_command(port, "--chat-template", str(template), *tools)
    with servers.running(command, port, folder / "log") as url:
        yield url


@pytest.fixture(scope="module")
def stable(serving_kernel):
    return serving_kernel(f"transformers:{MODEL}")


def counted(standing, n):
    """The counts of the gateway once it told that n requests were drawn for the sample."""

    def told():
        counts = standing()["gateways"][0]["counts"]
        drawn = counts["sampled"] + sum(counts["unsampled"].values())
        return counts if drawn >= n else None

    return until(told, f"{n} requests that were drawn")


CHAT = {"messages": [{"role": "user", "content": "The list of "}]}
TEXT = {"prompt": "The list of "}
ASKED = [
    {},
    {"stream": True},
    {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    {"temperature": 1.0, "top_p": 1.0},
    {"temperature": 0.7},
    {"logprobs": 2},
    {"logprobs": 2, "stream": True},
    {"return_token_ids": True},
    {"return_token_ids": True, "stream": True},
    {"stop": ["e"]},
    {"stop": ["e"], "stream": True},
    {"stop": "e", "include_stop_str_in_output": True},
    {"stop_token_ids": [273], "max_tokens": 64},
    {"n": 2},
    {"n": 2, "stream": True},
    {"echo": True},
]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CHATTED = [
    {"max_tokens": None},
    {"max_tokens": None, "stream": True},
    {"tools": [TOOL]},
    {"tools": [TOOL], "stream": True},
    {"tools": [TOOL], "tool_choice": "none", "stop": ["e"]},
]


def normal(text):
    """Without ids and times; of a stream what it says in all, and the shapes of its events.

    How many tokens an event has is a matter of how fast it is read.
    """
    text = re.sub(r"(cmpl|chatcmpl)-[0-9a-f]+", "ID", text)
    text = re.sub(r'"created":\d+', '"created":0', text)
    if not text.startswith("data: "):
        return text
    said, shapes = {}, set()
    for event in text.strip().split("\n\n"):
        data = event.removeprefix("data: ")
        if data == "[DONE]":
            shapes.add(data)
            continue
        found = json.loads(data)
        said["usage"] = found.pop("usage", None)  # of the last event
        for choice in found["choices"]:
            for place in (choice, choice.get("delta") or {}, choice.get("logprobs") or {}):
                for key, value in place.items():
                    if isinstance(value, list) or key in ("text", "content"):
                        name = (choice["index"], key, type(value))
                        said[name] = said[name] + value if name in said else value
                        place[key] = type(value).__name__
        shapes.add(json.dumps(found))
    return said, shapes


def test_a_sampled_reply_is_the_one_of_vllm_but_for_ids_and_times(vllm_url, stable, tmp_path):
    with gateway(tmp_path, vllm_url, stable) as (_, url, standing):
        for path, words in (("/v1/completions", TEXT), ("/v1/chat/completions", CHAT)):
            for own in ASKED if words is TEXT else ASKED + CHATTED:
                body = {"model": "tiny-lm", "max_tokens": 8, "seed": 5, **words, **own}
                if path.endswith("chat/completions") and "logprobs" in own:
                    body |= {"logprobs": True, "top_logprobs": 2}
                alone, told = (
                    httpx2.post(at + path, json=body, timeout=60) for at in (vllm_url, url)
                )
                assert alone.status_code == 200
                assert normal(told.text) == normal(alone.text), (path, own)
                drop = {"date", "content-length", "transfer-encoding", "connection", "x-request-id"}
                # what --show-pool adds beside
                drop |= {"x-servanda-decision", "x-servanda-pool"}
                heads = [{*reply.headers} - drop for reply in (alone, told)]
                assert heads[0] == heads[1], (path, own)
        counts = counted(standing, 2 * len(ASKED) + len(CHATTED))
    # stable has no template, and says nothing of chats
    assert counts["sampled"] >= 30 and set(counts["prompts"]) == {"equal", "unknown"}
    assert counts["unsampled"] == {"echo": 2}


EVIDENCE = [
    ("/v1/completions", {**TEXT, "stop": ["e"]}, "stop_string"),
    ("/v1/completions", {**TEXT, "stop": ["e"], "stream": True}, "stop_string"),
    ("/v1/completions", {**TEXT, "stop": "e", "include_stop_str_in_output": True}, "stop_string"),
    ("/v1/completions", {**TEXT, "stop_token_ids": [273], "max_tokens": 64}, "stop_string"),
    ("/v1/completions", {**TEXT, "n": 3}, "length"),
    ("/v1/completions", {**TEXT, "n": 3, "stream": True}, "length"),
    ("/v1/completions", {**TEXT, "max_tokens": None}, "length"),
    ("/v1/chat/completions", {**CHAT, "max_tokens": None}, None),
    ("/v1/chat/completions", {**CHAT, "tools": [TOOL], "n": 2}, "length"),
    (
        "/v1/chat/completions",
        {**CHAT, "tools": [TOOL], "stream": True, "stop": ["e"]},
        "stop_string",
    ),
]


def test_the_rows_of_ordinary_requests_hold_what_vllm_drew(vllm_url, stable, tmp_path):
    """Every token up to the one that completed a stop string, and of n choices the first."""
    drawn = []
    with gateway(tmp_path, vllm_url, stable, "--log", "served") as (_, url, standing):
        for path, more, _ in EVIDENCE:
            body = {"model": "tiny-lm", "max_tokens": 8, "seed": 5, **more}
            told = {**body, "stream": False, "return_token_ids": True, "logprobs": True}
            alone = httpx2.post(vllm_url + path, json=told, timeout=60).json()
            drawn.append(alone["choices"][0]["token_ids"])
            httpx2.post(url + path, json=body, timeout=60).raise_for_status()
        assert not counted(standing, len(EVIDENCE))["unsampled"]
    files = sorted((tmp_path / "served").glob("*.jsonl"))
    lines = [line for file in files for line in file.read_text().split("\n")]
    rows = [json.loads(line) for line in lines if line][-len(EVIDENCE) :]
    assert [row["token_ids"] for row in rows] == drawn
    assert all(len(row["logprobs"]) == len(row["token_ids"]) for row in rows)
    for row, (path, more, finish) in zip(rows, EVIDENCE, strict=True):
        assert row["finish"] == finish or finish is None, (path, more)
    assert [row["sampling"]["max_new_tokens"] for row in rows[6:8]] == [16, 511]


def test_the_calls_of_openais_client_get_what_they_get_of_vllm(vllm_url, tmp_path):
    """By the same server under two names, so that what stable serves is equal, too."""
    with gateway(tmp_path, vllm_url, vllm_url.replace("127.0.0.1", "localhost")) as (_, url, say):
        direct, through = (
            openai.OpenAI(base_url=f"{at}/v1", api_key="any", max_retries=0)
            for at in (vllm_url, url)
        )
        other = [
            (name, found)
            for name, call in CALLS.items()
            if (found := outcome(call, through, "tiny-lm")) != outcome(call, direct, "tiny-lm")
        ]
        assert not other
        until(lambda: say()["gateways"][0]["counts"]["sampled"] >= 15, "many were sampled")


POISON = {"structured_outputs": {"json": {"$ref": "#"}}}  # a schema without an end


def test_requests_that_make_the_server_fail_cost_no_other_request_an_answer(
    vllm_url, stable, tmp_path
):
    body = {"model": "tiny-lm", "max_tokens": 4, **TEXT}
    failed = httpx2.post(f"{vllm_url}/v1/completions", json={**body, **POISON}, timeout=60)
    assert failed.status_code == 500  # or this is no poison any more
    with gateway(tmp_path, vllm_url, stable) as (_, url, say), ThreadPoolExecutor(8) as pool:

        def asked(more):
            reply = httpx2.post(f"{url}/v1/completions", json={**body, **more}, timeout=60)
            return reply.status_code

        met = [*pool.map(asked, 150 * (POISON, {}))]
        assert set(met[1::2]) == {200} and 200 not in met[::2]
        assert say()["gateways"][0]["counts"]["pools"]["stable"] == "closed"


def test_a_cold_sampler_and_a_swapped_prompt_are_found_and_sound_answers_are_scored(
    vllm_url, stable, tmp_path
):
    with proxied(vllm_url) as infer, gateway(tmp_path, infer, stable) as (serving, url, say):
        met, over = Counter(), threading.Event()

        def user(number):
            lines = [line for line in PROMPTS if line["labels"]["domain"] in DOMAINS[:3]]
            while not over.is_set():
                line = lines[(met.total() * 7 + number) % len(lines)]
                body = {"model": "tiny-lm", "prompt": line["prompt"], "max_tokens": 16}
                body |= {"metadata": line["labels"], "user": f"u{number}"}
                reply = httpx2.post(f"{url}/v1/completions", json=body, timeout=60)
                assert reply.status_code == 200
                met[line["labels"]["domain"], reply.headers["x-servanda-pool"]] += 1

        with ThreadPoolExecutor(6) as pool:
            users = [pool.submit(user, number) for number in range(6)]
            try:
                slices = lambda: {one["name"]: one for one in say()["slices"]}  # noqa: E731
                serving.line(
                    rf"domain={COLD}: .* -> quarantined: sampler_fidelity on domain={COLD} fails: "
                    r"tokens are not drawn as infer reports, but more as with \S+ 0\.[5-7]"
                )
                until(lambda: "another prompt" in slices()[f"domain={SWAPPED}"]["held"], "a page")
                until(lambda: slices()[f"domain={SOUND}"]["scored"] > 60, "evidence")
                found = slices()
            finally:
                over.set()
            for one in users:
                one.result()
        assert found[f"domain={COLD}"]["status"] == "quarantined"
        assert found[f"domain={SWAPPED}"]["status"] != "quarantined"
        assert found[f"domain={SOUND}"]["status"] in ("active", "suspect")
        assert not found[f"domain={SOUND}"]["held"]
        counts = say()["gateways"][0]["counts"]
        assert counts["prompts"]["other"] >= found[f"domain={SWAPPED}"]["scored"]
        assert met[COLD, "stable"] > 0 == met[SOUND, "stable"]
