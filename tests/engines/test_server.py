# The server says what the engine says: ids, logprobs, likeliest tokens, texts.

from __future__ import annotations

import concurrent.futures
import json
import os
import signal
import subprocess
import sys

import httpx2
import pytest
from click.testing import CliRunner
from starlette.testclient import TestClient

from servanda.cli.main import main
from servanda.contract.model import Kernel
from servanda.engines import open_engine
from servanda.engines.base import streams
from servanda.engines.faults import FAULTS
from servanda.engines.server.app import Limits, Server
from servanda.engines.server.scheduler import SEED, sequence_of
from servanda.engines.server.sockets import bound
from servanda.engines.table import TableEngine
from servanda.theory.sampling import Sampling, processed_logprobs
from servanda.traces.trace import Batch
from tests import kit
from tests.engines.serving import WAIT_S, Gated, live, table_engine

PLAIN = Sampling()
WARM = {"temperature": 0.7, "top_k": 4, "top_p": 0.95, "min_p": 0.01}
PROMPT = (0, 1)
URL = "/v1/completions"


@pytest.fixture
def engine(tmp_path):
    return table_engine(tmp_path)


@pytest.fixture
def client(engine):
    with TestClient(Server(engine, "toy", Limits(wait_s=0.0), False).app()) as client:
        yield client


def ask(client, url=URL, **fields):
    reply = client.post(url, json={"prompt": list(PROMPT), "max_tokens": 6, **fields})
    assert reply.status_code == 200, reply.text
    return reply.json()


def choice(client, **fields):
    found = ask(client, **{"return_token_ids": True, **fields})["choices"]
    assert len(found) == 1
    return found[0]


def refused(client, url=URL, **fields):
    reply = client.post(url, json={"prompt": list(PROMPT), **fields})
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["code"] == 400
    return error["param"], error["message"]


def drawn(engine, seed, sampling=PLAIN, width=6, prompt=PROMPT):
    return engine.generate(Batch((seed,), (prompt,), width), sampling, SEED)


def scored(engine, given, sampling=PLAIN, path="decode", width=6, prompt=PROMPT):
    return engine.score(Batch((0,), (prompt,), width, (tuple(given),)), sampling, path)


def events(text):
    *lines, done, last = text.split("\n\n")
    assert (done, last) == ("data: [DONE]", "")
    return [json.loads(line.removeprefix("data: ")) for line in lines]


# what is drawn


@pytest.mark.parametrize("fields", [{}, WARM], ids=["plain", "filtered"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_ids_and_logprobs_are_those_of_the_engine_asked_directly(engine, client, fields, stream):
    for seed in range(20):
        oracle = drawn(engine, seed, Sampling(**fields))
        asked = {"seed": seed, "logprobs": 0, **fields, "return_token_ids": True}
        if stream:
            body = {"prompt": list(PROMPT), "max_tokens": 6, "stream": True, **asked}
            parts = [e["choices"][0] for e in events(client.post(URL, json=body).text)]
        else:
            parts = [choice(client, **asked)]
        ids = [i for part in parts for i in part["token_ids"]]
        logps = [lp for part in parts for lp in part["logprobs"]["token_logprobs"]]
        assert ids == oracle.token_N.tolist()
        assert logps == oracle.columns["logp"].tolist()
        ended = ids[-1] == len(kit.TOKENS) - 1
        assert parts[-1]["finish_reason"] == ("stop" if ended else "length")
        text = "".join(part["text"] for part in parts)
        assert text == engine.decode([ids[:-1] if ended else ids])[0]


def test_the_same_seed_draws_the_same_alone_and_in_a_crowd(tmp_path):
    engine = table_engine(tmp_path, cls=Gated)
    engine.open()
    seeds = [3, *range(100, 130), 3]
    with live(engine, max_batch=16, wait_s=0.05) as (client, _):
        alone = {seed: choice(client, seed=seed)["token_ids"] for seed in set(seeds)}
        before = len(engine.batches)
        with concurrent.futures.ThreadPoolExecutor(len(seeds)) as pool:
            crowd = [*pool.map(lambda seed: choice(client, seed=seed)["token_ids"], seeds)]
    assert crowd == [alone[seed] for seed in seeds]
    assert max(map(len, engine.batches[before:])) > 1  # they did run together
    assert all(len(set(batch)) == len(batch) for batch in engine.batches)


def test_choices_of_one_request_are_drawn_apart_and_the_first_is_the_seed_itself(engine, client):
    found = ask(client, prompt=[[0], [1]], n=3, seed=5, return_token_ids=True)
    for index, entry in enumerate(found["choices"]):
        prompt = ((0,), (1,))[index // 3]
        oracle = drawn(engine, sequence_of(5, index), prompt=prompt)
        assert (entry["index"], entry["token_ids"]) == (index, oracle.token_N.tolist())
        assert entry["prompt_token_ids"] == list(prompt)
    new = sum(len(entry["token_ids"]) for entry in found["choices"])
    assert found["usage"] == {"prompt_tokens": 2, "completion_tokens": new, "total_tokens": 2 + new}
    assert sequence_of(5, 0) == 5


def test_without_a_seed_every_draw_is_fresh(client):
    found = {tuple(choice(client, max_tokens=12)["token_ids"]) for _ in range(12)}
    assert len(found) > 6


def test_greedy_is_the_likeliest_token_and_its_probability_is_one(engine, client):
    found = choice(client, temperature=0, logprobs=0, seed=1)
    assert found["token_ids"] == drawn(engine, 1, Sampling(top_k=1)).token_N.tolist()
    assert found["logprobs"]["token_logprobs"] == [0.0] * 6


def test_given_tokens_are_decoded_and_their_processed_logprobs_returned(engine, client):
    given = [2, 0, 1]
    found = choice(client, trace_decode_token_ids=given, logprobs=2, **WARM, max_tokens=None)
    oracle = scored(engine, given, Sampling(**WARM))
    assert found["token_ids"] == given and found["finish_reason"] == "length"
    assert found["logprobs"]["token_logprobs"] == oracle.columns["logp"].tolist()
    # a filter takes d away, and JSON has no infinity
    given = [3]
    found = choice(client, trace_decode_token_ids=given, logprobs=0, top_k=2)
    assert found["logprobs"]["token_logprobs"] == [-9999.0]


# the likeliest tokens


def best_by_hand(engine, prefix, k, sampling):
    row = engine.table.logits_CV[[engine.table.row_of(prefix)]]
    logp = processed_logprobs(row, sampling)[0]
    order = sorted(range(len(logp)), key=lambda i: (-logp[i], i))[:k]
    return {f"token_id:{i}": max(float(logp[i]), -9999.0) for i in order}


@pytest.mark.parametrize("given", [None, [0, 3, 2]], ids=["drawn", "given"])
@pytest.mark.parametrize("k", [1, 3, 5, -1])
def test_the_likeliest_tokens_have_the_drawn_one_among_them(engine, client, k, given):
    fields = {**WARM, "logprobs": k, "seed": 4, "return_tokens_as_token_ids": True}
    fields |= {"trace_decode_token_ids": given} if given else {}
    found = choice(client, **fields)
    prefix = list(PROMPT)
    tops = found["logprobs"]["top_logprobs"]
    for token, logp, top in zip(
        found["token_ids"], found["logprobs"]["token_logprobs"], tops, strict=True
    ):
        own = {f"token_id:{token}": logp}
        assert top == best_by_hand(engine, prefix, k % 6, Sampling(**WARM)) | own
        assert next(iter(top)) == f"token_id:{token}"
        prefix.append(token)


def test_prompt_logprobs_are_the_prefill_scores_of_the_model_alone(engine, client):
    prompt = [0, 1, 1, 3]
    found = choice(client, prompt=prompt, prompt_logprobs=2, temperature=0.5, max_tokens=1)
    oracle = scored(engine, prompt[1:], path="prefill", width=3, prompt=(0,))
    first, *rows = found["prompt_logprobs"]
    assert first is None
    for at, (row, token) in enumerate(zip(rows, prompt[1:], strict=True)):
        own = row[str(token)]
        assert own["logprob"] == oracle.columns["logp"][at]
        assert own["rank"] == oracle.columns["rank"][at] + 1
        assert own["decoded_token"] == kit.TOKENS[token]
        best = best_by_hand(engine, prompt[: at + 1], 2, PLAIN)
        assert {f"token_id:{i}": row[i]["logprob"] for i in row} == best | {
            f"token_id:{token}": own["logprob"]
        }


def test_echo_gives_the_prompt_back_with_its_logprobs(engine, client):
    found = choice(client, prompt="a b b", echo=True, logprobs=0, max_tokens=0)
    oracle = scored(engine, [1, 1], path="prefill", width=2, prompt=(0,))
    assert found["text"] == "a b b" and found["token_ids"] == []
    logprobs = found["logprobs"]
    assert logprobs["tokens"] == ["a", "b", "b"]
    assert logprobs["token_logprobs"] == [None, *oracle.columns["logp"].tolist()]
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["text_offset"] == [0, 1, 2]
    assert choice(client, echo=True, max_tokens=1, seed=0)["text"].startswith("a b")


# streams


def test_a_token_leaves_when_it_is_drawn_and_not_when_the_batch_is_over(tmp_path):
    engine = table_engine(tmp_path, {"": [0.5, 0.5, 0, 0, 0]}, cls=Gated)
    body = {"prompt": [0], "max_tokens": 3, "stream": True, "return_token_ids": True, "seed": 9}
    seen = []
    with live(engine) as (client, _), client.stream("POST", URL, json=body) as reply:
        lines = (line for line in reply.iter_lines() if line)
        for _ in range(3):  # the engine draws on only after the token before has arrived
            engine.gate.release()
            seen += json.loads(next(lines).removeprefix("data: "))["choices"][0]["token_ids"]
        assert [*lines] == ["data: [DONE]"]
    oracle = drawn(TableEngine(engine.kernel), 9, width=3, prompt=(0,))
    assert seen == oracle.token_N.tolist() and len(seen) == 3


def test_events_come_in_order_then_the_usage_then_done(client):
    body = {"prompt": [[0], [1, 2]], "n": 2, "max_tokens": 4, "stream": True, "seed": 2}
    body |= {"stream_options": {"include_usage": True}, "return_token_ids": True, "echo": True}
    *parts, last = events(client.post(URL, json=body).text)
    whole = ask(client, **{**body, "stream": False, "stream_options": None})
    assert last["choices"] == [] and last["usage"] == whole["usage"]
    assert {part["id"] for part in parts} == {last["id"]}
    for entry in whole["choices"]:
        mine = [p["choices"][0] for p in parts if p["choices"][0]["index"] == entry["index"]]
        assert "".join(p["text"] for p in mine) == entry["text"]
        assert [i for p in mine for i in p["token_ids"]] == entry["token_ids"]
        assert [p["finish_reason"] for p in mine[:-1]] == [None] * (len(mine) - 1)
        assert mine[-1]["finish_reason"] == entry["finish_reason"]
        assert [p["prompt_token_ids"] for p in mine if p["prompt_token_ids"]] == [
            entry["prompt_token_ids"]
        ]


def test_an_engine_without_steps_streams_its_batch_at_the_end(tmp_path):
    class Whole(TableEngine):
        def generate(self, batch, sampling, seed):
            return super().generate(batch, sampling, seed)

    engine = table_engine(tmp_path, cls=Whole)
    assert not streams(engine) and streams(table_engine(tmp_path))
    with TestClient(Server(engine, "toy", Limits(wait_s=0.0), False).app()) as client:
        body = {"prompt": list(PROMPT), "max_tokens": 6, "stream": True, "seed": 8, "logprobs": 2}
        parts = [e["choices"][0] for e in events(client.post(URL, json=body).text)]
        oracle = drawn(engine, 8)
        logps = [lp for part in parts for lp in part["logprobs"]["token_logprobs"]]
        assert logps == oracle.columns["logp"].tolist()
        assert "".join(p["text"] for p in parts) == choice(client, seed=8)["text"]


def test_a_fault_of_the_kernel_is_in_what_is_served(tmp_path):
    """Faults override generate: the steps beneath them would be those of the sound kernel."""
    broken = FAULTS["undisclosed_temperature"].inject(TableEngine, 0.2)
    engine = table_engine(tmp_path, cls=broken)
    with TestClient(Server(engine, "toy", Limits(wait_s=0.0), False).app()) as client:
        for seed in range(8):
            oracle = drawn(engine, seed)
            found = choice(client, seed=seed, logprobs=0)
            assert found["token_ids"] == oracle.token_N.tolist()
            assert found["logprobs"]["token_logprobs"] == oracle.columns["logp"].tolist()


# chats

WORDS = ["hi", "so", "it", "is", "<eos>"]
ONE = {name: [float(n == i) for n in range(5)] for i, name in enumerate(WORDS)}
CHAIN = dict(zip(["", *WORDS[:-1]], [ONE["<eos>"], *(ONE[w] for w in WORDS[1:])], strict=True))


class Chatting(TableEngine):
    def render(self, messages, tools=None):
        self.rendered = (list(messages), tools)
        return " ".join(message["content"] for message in messages)


@pytest.fixture
def chat(tmp_path):
    engine = table_engine(tmp_path, CHAIN, WORDS, Chatting)
    with TestClient(Server(engine, "toy", Limits(wait_s=0.0), False).app()) as client:

        def call(**fields):
            body = {"messages": [{"role": "user", "content": "hi"}], **fields}
            return client.post("/v1/chat/completions", json=body)

        yield call


def test_a_chat_is_the_template_then_a_completion(chat):
    found = chat(return_token_ids=True, logprobs=True, top_logprobs=2).json()
    entry = found["choices"][0]
    assert entry["message"] == {"role": "assistant", "content": "so it is"}
    assert found["prompt_token_ids"] == [0] and entry["token_ids"] == [1, 2, 3, 4]
    assert entry["finish_reason"] == "stop"
    content = entry["logprobs"]["content"]
    assert [c["token"] for c in content] == WORDS[1:]
    assert [c["logprob"] for c in content] == [0.0] * 4
    assert [len(c["top_logprobs"]) for c in content] == [2] * 4
    assert content[0]["bytes"] == list(b"so")


def test_a_streamed_chat_begins_with_its_role(chat):
    first, *rest = [e["choices"][0] for e in events(chat(stream=True).text)]
    assert first["delta"] == {"role": "assistant", "content": ""}
    assert "".join(part["delta"]["content"] for part in rest) == "so it is"
    assert rest[-1]["finish_reason"] == "stop"


def test_a_model_without_a_template_says_so(client):
    body = {"messages": [{"role": "user", "content": "a"}]}
    reply = client.post("/v1/chat/completions", json=body)
    assert reply.status_code == 400
    assert "there is no chat template: send /v1/completions" in reply.json()["error"]["message"]


# what it says of itself


def test_what_the_server_says_of_itself(engine, client):
    about = engine.describe()
    assert client.get("/health").status_code == 200
    assert client.get("/version").json()["version"]
    model = client.get("/v1/models").json()["data"][0]
    assert (model["id"], model["owned_by"], model["max_model_len"]) == ("toy", "servanda", 4096)
    told = client.get("/servanda/describe").json()
    assert told["fingerprint"] == dict(about.fingerprint)
    assert (told["tokens"], told["vocab_size"], told["eos"]) == (about.tokens, 5, [4])
    assert (told["weights"], told["digest"]) == (about.weights, about.digest)
    assert (told["scores"], told["encodes"]) == (["prefill", "decode"], True)
    assert (told["logprobs"], told["prompt_logprobs"]) == ("processed", "raw")


def test_texts_go_to_ids_and_back(client):
    assert client.post("/tokenize", json={"prompt": "a c"}).json()["tokens"] == [0, 2]
    assert client.post("/detokenize", json={"tokens": [0, 2]}).json() == {"prompt": "a c"}


# the process


def test_the_command_serves_until_it_is_told_to_end(tmp_path):
    engine = table_engine(tmp_path)
    command = [
        sys.executable,
        "-m",
        "servanda",
        "tools",
        "serve-kernel",
        f"table:{tmp_path / 'p.json'}",
    ]
    running = subprocess.Popen(
        [*command, "--port", "0", "--served", "mine", "--test-mode"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ,
    )
    try:
        line = running.stdout.readline()
        name, url = line.split()[0], line.split()[2]
        body = {"prompt": "a b", "max_tokens": 6, "seed": 11, "return_token_ids": True}
        reply = httpx2.post(f"{url}{URL}", json={**body, "model": "mine"}, timeout=WAIT_S)
        fault = {"lost_top_token": 1.0}
        wrong = {"kind": "kernel", "fault": fault}
        httpx2.post(f"{url}/servanda/misbehave", json=wrong, timeout=WAIT_S).raise_for_status()
        later = httpx2.post(f"{url}{URL}", json=body, timeout=WAIT_S)
        running.send_signal(signal.SIGTERM)
        output, errors = running.communicate(timeout=WAIT_S)
    finally:
        running.kill()
        running.wait()
        running.stdout.close()
        running.stderr.close()
    assert (name, running.returncode, output, errors) == ("mine", 0, "", "")
    assert reply.json()["choices"][0]["token_ids"] == drawn(engine, 11).token_N.tolist()
    broken = open_engine(Kernel(engine="table", model=str(tmp_path / "p.json"), fault=fault))
    assert later.json()["choices"][0]["token_ids"] == drawn(broken, 11).token_N.tolist()


def test_what_cannot_be_served_is_said_with_its_place(tmp_path):
    table_engine(tmp_path)

    def run(*arguments):
        done = CliRunner().invoke(main, ["tools", "serve-kernel", *arguments])
        return done.exit_code, done.output

    code, text = run("tabel:p.json")
    assert code == 2 and "kernel:1:1: no engine is named 'tabel'" in text
    code, text = run("table:none.json")
    assert code == 2 and "there is no none.json" in text
    (tmp_path / "odd.json").write_text("{}")
    code, text = run(f"table:{tmp_path / 'odd.json'}", "--port", "0")
    assert code == 4 and "not a table of next-token probabilities" in text
    code, text = run("http://127.0.0.1:8000")
    assert code == 2 and "a server is served already" in text
    code, text = run(f"table:{tmp_path / 'p.json'},python={sys.executable}")
    assert code == 2 and f"start it there: {sys.executable} -m servanda tools serve-kernel" in text
    with bound("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        code, text = run(f"table:{tmp_path / 'p.json'}", "--port", str(port))
    assert code == 4
    assert f"nothing can be served at 127.0.0.1:{port}: Address already in use" in text
    assert "hint: --port 0 takes a free port" in text


def test_a_missing_library_is_said_with_the_pip_line(tmp_path, monkeypatch):
    table_engine(tmp_path)
    monkeypatch.setitem(sys.modules, "servanda.engines.server.process", None)
    done = CliRunner().invoke(main, ["tools", "serve-kernel", f"table:{tmp_path / 'p.json'}"])
    assert done.exit_code == 4 and "hint: pip install 'servanda[serve]'" in done.output
