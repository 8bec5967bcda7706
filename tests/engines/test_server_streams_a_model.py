# The server before a real model: what is streamed is what the engine draws, letter by letter.

from __future__ import annotations

import json
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from servanda.contract.model import Kernel
from servanda.engines.server.app import Limits, Server
from servanda.engines.server.scheduler import SEED, Detokenizer, StreamDetokenizer
from servanda.engines.transformers import TransformersEngine
from servanda.theory.sampling import Sampling
from servanda.traces.trace import Batch, Trace
from tests.engines.serving import live
from tests.transcripts import blocks

ROOT = Path(__file__).parents[2]
MODEL, PAGE = ROOT / "models" / "tiny-lm", ROOT / "docs" / "how-to" / "serve_kernel.md"
URL = "/v1/completions"


@pytest.fixture(scope="module")
def engine():
    return TransformersEngine(
        Kernel(engine="transformers", model=str(MODEL), dtype="float32", batch_size=4)
    )


@pytest.fixture(scope="module")
def client(engine):
    with TestClient(Server(engine, "tiny", Limits(max_batch=4, wait_s=0.0), False).app()) as c:
        yield c


def launched(engine, n=6, width=12):
    texts = ["The cat", "A very long time ago there was", "1 + 1 =", "é", "She said:", "In"]
    return Batch(tuple(range(n)), tuple(map(tuple, engine.encode(texts[:n]))), width)


@pytest.mark.parametrize("best", [0, 3])
def test_the_steps_of_a_batch_are_its_trace(engine, best):
    """Bit for bit, over more sequences than run together."""
    batch, sampling = launched(engine), Sampling(temperature=0.8, top_p=0.9)
    whole = engine.generate(batch, sampling, 3)
    steps = [*engine.steps(batch, sampling, 3, best)]
    rows = {s: [] for s in batch.sequence_S}
    for step in steps:
        ends = step.length_S.cumsum()
        for sequence, length, end in zip(step.sequence_S, step.length_S, ends, strict=True):
            if length:
                rows[int(sequence)].append((step, int(end) - 1))
    found = [pair for sequence in batch.sequence_S for pair in rows[sequence]]
    assert [int(step.token_N[n]) for step, n in found] == whole.token_N.tolist()
    assert [len(rows[s]) for s in batch.sequence_S] == whole.length_S.tolist()
    for name, values in whole.columns.items():
        assert [step.columns[name][n] for step, n in found] == values.tolist()
    assert not best or all(step.best is not None for step in steps)
    assert isinstance(steps[0], Trace) and steps[0].about == whole.about


def test_a_stream_is_the_draw_of_the_engine(engine, client):
    prompt = launched(engine).prompts[1]
    body = {"prompt": list(prompt), "max_tokens": 24, "seed": 5, "stream": True, "logprobs": 2}
    *lines, done, _ = client.post(URL, json={**body, "return_token_ids": True}).text.split("\n\n")
    parts = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines]
    oracle = engine.generate(Batch((5,), (prompt,), 24), Sampling(), SEED)
    assert done == "data: [DONE]"
    assert [i for p in parts for i in p["token_ids"]] == oracle.token_N.tolist()
    logps = [lp for p in parts for lp in p["logprobs"]["token_logprobs"]]
    assert logps == oracle.columns["logp"].tolist()
    ids = [i for i in oracle.token_N.tolist() if i not in engine.describe().eos]
    assert "".join(p["text"] for p in parts) == engine.decode([ids])[0]


def test_given_tokens_have_the_logprobs_that_drawing_them_had(engine, client):
    prompt = launched(engine).prompts[0]
    oracle = engine.generate(Batch((5,), (prompt,), 9), Sampling(), SEED)
    given = oracle.token_N.tolist()
    body = {"prompt": list(prompt), "max_tokens": 9, "trace_decode_token_ids": given}
    found = client.post(URL, json={**body, "logprobs": 3}).json()["choices"][0]["logprobs"]
    assert found["token_logprobs"] == oracle.columns["logp"].tolist()
    assert all(len(top) in (3, 4) for top in found["top_logprobs"])


def test_what_is_said_token_by_token_is_the_text(engine):
    detokenizer = Detokenizer(engine, engine.describe())
    for text in ("naïve – “quoted” 🙂🙂 end", "日本語 x", "plain words, and more.", " a  b\n\n c"):
        stream_detokenizer, ids = StreamDetokenizer(detokenizer), engine.encode([text])[0]
        parts = [stream_detokenizer.after([i]) for i in ids]
        assert "".join(parts) + stream_detokenizer.rest() == engine.decode([ids])[0]
        assert "�" not in "".join(parts)


def test_a_chat_template_is_applied_and_a_missing_one_is_said(engine, client):
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2, "seed": 1}
    reply = client.post("/v1/chat/completions", json=body)
    assert reply.status_code == 400 and "has no chat template" in reply.json()["error"]["message"]
    template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if tools %}{{ tools | length }} tools\n{% endif %}assistant:"
    )
    engine._tokenizer.chat_template = template
    try:
        found = client.post("/v1/chat/completions", json={**body, "return_token_ids": True})
        ids = engine.encode(["user: Hello\nassistant:"])[0]
        assert found.json()["prompt_token_ids"] == ids
        tools = {"tools": [{"type": "function", "function": {"name": "f"}}]}
        tokens = client.post("/tokenize", json={"messages": body["messages"], **tools}).json()
        assert tokens["tokens"] == engine.encode(["user: Hello\n1 tools\nassistant:"])[0]
        # what the template is not given here is refused, and not left out without a word
        for more in ({"add_generation_prompt": False}, {"chat_template_kwargs": {"think": False}}):
            asked = {"messages": body["messages"], **more}
            assert client.post("/tokenize", json=asked).status_code == 400
        engine._tokenizer.chat_template = "{{ raise_exception('no system role') }}"
        refused = client.post("/v1/chat/completions", json=body)
        assert refused.status_code == 400 and "no system role" in refused.text
    finally:
        engine._tokenizer.chat_template = None


def test_the_python_of_the_page_runs(engine):
    code = next(iter(blocks(PAGE, "py")))
    with live(engine) as (client, _):
        found: dict = {}
        exec(code.replace("http://127.0.0.1:8000", str(client.base_url).rstrip("/")), found)
    drawn = found["drawn"]["logprobs"]["token_logprobs"]
    assert found["decode"]["logprobs"]["token_logprobs"] == drawn
    rows = found["prefill"][2:]
    logps = [
        row[str(i)]["logprob"] for row, i in zip(rows, found["drawn"]["token_ids"], strict=True)
    ]
    assert logps == pytest.approx(drawn, abs=1e-4)
