# Routed experts in replies, encoded as vLLM and SGLang encode them: the experts of a token are a
# function of the token that is fed, so which row belongs to which token is known.

import base64
import io
import json

import numpy as np
import pytest

from servanda.contract.model import Kernel
from servanda.engines.http import routed_experts
from servanda.engines.http.engine import HTTPEngine
from servanda.engines.http.responses import Part
from servanda.engines.http.transport import Limits
from servanda.engines.http_policy import RetryPolicy
from servanda.errors import MeasurementError
from servanda.theory.sampling import Sampling
from servanda.traces.trace import Batch
from tests.engines.replaying import replaying

QUICK = Limits(connect_s=60.0, read_s=60.0, retry=RetryPolicy(tries=1))
LAYERS, PICKED, WORDS, EXPERTS = 3, 4, 32, 16
EXPERTS_OF = np.stack(
    [[np.random.default_rng((t, layer)).permutation(EXPERTS)[:PICKED] for layer in range(LAYERS)]
     for t in range(WORDS)]
)  # fmt: skip
DRAWN = [9, 11, 3, 20]
PROMPTS = ((5, 6, 7), (8, 1, 4, 2))


def recorded(tokens, dense=()):
    """A row for each token but the last; layers without a router are zeros."""
    rows = EXPERTS_OF[np.array(tokens[:-1]) % WORDS].copy()
    return np.insert(rows, list(dense), 0, axis=1) if dense else rows


def npy(rows, kind="uint8"):
    stream = io.BytesIO()
    np.save(stream, rows.astype(kind))
    return base64.b64encode(stream.getvalue()).decode()


class VLLM:
    """A server of vLLM as far as it is asked, with a fault in what it records."""

    def __init__(self, change=npy, dense=()):
        self.change, self.dense = change, dense

    def __call__(self, body):
        prompt, given = body["prompt"], DRAWN[: body["max_tokens"]]
        choice = {
            "index": 0, "text": "", "finish_reason": "length", "stop_reason": None,
            "prompt_token_ids": prompt, "token_ids": given, "prompt_logprobs": None,
            "logprobs": {
                "tokens": [f"token_id:{t}" for t in given],
                "token_logprobs": [-1.0] * len(given),
                "top_logprobs": [
                    {f"token_id:{k}": -1.0 for k in (t, *range(24, 31))} for t in given
                ],
            },
        }  # fmt: skip
        if (k := body.get("prompt_logprobs")) is not None:
            others = range(40, 40 + k)

            def row(t):
                return {str(j): {"logprob": -1.0} for j in dict.fromkeys((t, *others))}

            choice["prompt_logprobs"] = [None, *map(row, prompt[1:])]
        if self.change is not None:
            choice["routed_experts"] = self.change(recorded([*prompt, *given], self.dense))
        return {"choices": [choice], "usage": {}}

    @property
    def pages(self):
        models = {"data": [{"id": "m", "max_model_len": 64}]}
        return {"/version": {"version": "0.24.0"}, "/v1/models": models, "/v1/completions": self}


class SGLang:
    """The same of SGLang: flat numbers, and the sizes are not told."""

    def __init__(self, kind="int32", more=0, says=None, enabled=True):
        self.kind, self.more, self.says, self.enabled = kind, more, says, enabled
        self.wanted = []

    def __call__(self, body):
        prompt, new = body["input_ids"], body["sampling_params"]["max_new_tokens"]
        drawn, k = DRAWN[:new], body.get("top_logprobs_num", 0)
        self.wanted.append(body.get("return_routed_experts"))
        row = lambda t: [-1.0, t, None]  # noqa: E731
        top = lambda t: [row(j) for j in (t, *range(40, 40 + k))][:k]  # noqa: E731
        meta = {"prompt_tokens": len(prompt), "completion_tokens": new,
                "finish_reason": {"type": "length"}}  # fmt: skip
        for side, tokens in (("input", prompt), ("output", drawn)):
            meta[f"{side}_token_logprobs"] = [*map(row, tokens)]
            meta[f"{side}_top_logprobs"] = [*map(top, tokens)]
        meta["input_token_logprobs"][0][0] = None
        if body.get("return_routed_experts"):
            rows = recorded([*prompt, *drawn])
            rows = np.concatenate([rows, rows[:1]])[: len(rows) + self.more]
            meta["routed_experts"] = base64.b64encode(rows.astype(self.kind).tobytes()).decode()
            meta |= {} if self.says is None else {"routed_experts_dtype": self.says}
        return {"output_ids": drawn, "meta_info": meta}

    @property
    def pages(self):
        models = {"data": [{"id": "m", "max_model_len": 600}]}
        info = {"model_path": "m", "version": "0.5.9"}
        told = {**info, "enable_return_routed_experts": self.enabled}
        return {
            "/get_model_info": info, "/get_server_info": told, "/v1/models": models,
            "/generate": self, "/flush_cache": "ok",
        }  # fmt: skip


class LMDeploy:
    """lmdeploy 0.16: lists, and logprobs of drawn tokens alone."""

    def __init__(self, change=np.ndarray.tolist, mode=True, **more):
        self.change, self.mode, self.more = change, mode, more

    def __call__(self, body):
        prompt, given = body["input_ids"], DRAWN[: body["max_tokens"]]
        meta = {
            "prompt_tokens": len(prompt), "completion_tokens": len(given),
            "finish_reason": {"type": "length"},
            "output_token_logprobs": [[-1.0, t] for t in given] if self.mode else None,
            "routed_experts": self.change(recorded([*prompt, *given])),
            **self.more,
        }  # fmt: skip
        return {"text": "", "output_ids": given, "meta_info": meta}

    @property
    def pages(self):
        models = {"data": [{"id": "m", "object": "model", "owned_by": "lmdeploy"}]}
        return {"/v1/models": models, "/generate": self}


@pytest.fixture
def opened():
    with replaying([]) as server:

        def engine(made):
            pages = made.pages

            def answer(endpoint, body):
                value = pages.get(endpoint)
                value = value(body) if callable(value) else value
                text = value if isinstance(value, str) else json.dumps(value)
                return (404, "{}", {}) if value is None else (200, text, {})

            server.answer = answer
            made_engine = HTTPEngine(Kernel(engine="openai_http", url=server.url), QUICK)
            server.stack.callback(made_engine.close)
            return made_engine

        yield engine


def expected(batch):
    """The experts of the token before each one of an answer, sorted in each layer."""
    before = [[p[-1], *DRAWN[: batch.width - 1]] for p in batch.prompts]
    return np.sort(EXPERTS_OF[np.concatenate(before)], axis=-1)


def batch(width=4, scored=False):
    given = tuple((*DRAWN[:width],) for _ in PROMPTS) if scored else ()
    return Batch((0, 1), PROMPTS, width, given)


SERVERS = [
    *(VLLM(lambda rows, k=kind: npy(rows, k)) for kind in ("uint8", "uint16", "int32")),
    VLLM(dense=(0, 2)),
    SGLang(),
    SGLang("uint8", says="uint8"),
    SGLang(more=1),
    LMDeploy(),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("made", SERVERS, ids=lambda made: type(made).__name__)
@pytest.mark.parametrize("scored", [False, True])
def test_the_experts_of_each_token_are_those_of_the_token_that_was_fed(opened, made, scored):
    engine, asked = opened(made), batch(scored=scored)
    if scored and "prefill" not in engine.describe().scores:
        with pytest.raises(MeasurementError, match="cannot score given tokens by prefill"):
            engine.score(asked, Sampling(temperature=1.0), "prefill")
        return
    if scored:
        trace = engine.score(asked, Sampling(temperature=1.0), "prefill")
    else:
        trace = engine.generate(asked, Sampling(temperature=1.0), 0)
    np.testing.assert_array_equal(trace.routes, expected(asked))
    assert [route.shape for route in trace.routes_S] == [(4, LAYERS, PICKED)] * 2


def test_a_server_without_the_option_is_asked_for_nothing_and_has_no_routes(opened):
    made = SGLang(enabled=False)
    assert opened(made).generate(batch(), Sampling(temperature=1.0), 0).routes is None
    assert {*made.wanted} == {None}
    assert opened(VLLM(None)).generate(batch(), Sampling(temperature=1.0), 0).routes is None


def test_an_answer_without_experts_among_others_is_unknown(opened):
    class Some(VLLM):
        def __call__(self, body):
            self.change = None if body["prompt"] == list(PROMPTS[0]) else npy
            return super().__call__(body)

    found = opened(Some()).generate(batch(), Sampling(temperature=1.0), 0)
    assert np.isnan(found.routes[:4]).all()
    np.testing.assert_array_equal(found.routes[4:], expected(batch())[4:])
    assert (found.routes_S[0] == -1).all()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda rows: npy(rows[2:]),
            "has .* rows for the .* tokens that were fed: rows of the prompt",
        ),
        (
            lambda rows: npy(np.concatenate([rows, rows[:1]])),
            "has .* rows for the .* tokens that were",
        ),
        (lambda rows: npy(rows[:, 0]), "is of uint8 and shape .*, not of whole numbers"),
        (lambda rows: npy(rows, "float32"), "is of float32 and shape"),
        (lambda _: "no base64!", "is no base64"),
        (lambda _: base64.b64encode(b"none").decode(), "is no array of NumPy"),
        (lambda rows: rows.tolist(), "is .*, not a text"),
    ],
)
def test_what_vllm_does_not_return_is_refused_with_its_field(opened, change, says):
    with pytest.raises(MeasurementError, match=r"choices\[0\].routed_experts " + says):
        opened(VLLM(change)).generate(batch(), Sampling(temperature=1.0), 0)


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (SGLang(more=-1), "numbers for the .* tokens that were fed"),
        (SGLang(says="float8"), "is said to be of 'float8'"),
    ],
)
def test_what_sglang_does_not_return_is_refused_with_its_field(opened, made, says):
    with pytest.raises(MeasurementError, match=r"meta_info.routed_experts .*(" + says + ")"):
        opened(made).generate(batch(3), Sampling(temperature=1.0), 0)


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (
            LMDeploy(lambda rows: rows[1:].tolist()),
            r"routed_experts (is \[\], not a list|has .* rows for the)",
        ),
        (LMDeploy(lambda rows: rows[0].tolist()), "routed_experts.* not a list"),
        (LMDeploy(mode=False), "output_token_logprobs is missing\n  hint: start it with --logp"),
        (LMDeploy(output_token_logprobs=[[-1.0, 1]]), "output_token_logprobs.* of the token 9"),
        (LMDeploy(prompt_tokens=9), "meta_info.prompt_tokens is 9, and .* tokens were sent"),
    ],
)
def test_what_lmdeploy_does_not_return_is_refused_with_its_field(opened, made, says):
    with pytest.raises(MeasurementError, match=says):
        opened(made).generate(batch(), Sampling(temperature=1.0), 0)


def test_lmdeploy_with_a_shared_store_returns_a_key_and_no_experts(opened):
    found = opened(LMDeploy(lambda _: "key-1")).generate(batch(), Sampling(temperature=1.0), 0)
    assert found.routes is None and (found.columns["logp"] == -1).all()


def test_lmdeploy_is_refused_a_sampling_that_its_logprobs_are_not_of(opened):
    with pytest.raises(MeasurementError, match="before the temperature and the filters"):
        opened(LMDeploy()).generate(batch(), Sampling(temperature=0.7), 0)


def test_experts_of_two_models_are_refused(opened):
    class Two(VLLM):
        def __call__(self, body):
            first = body["prompt"] == list(PROMPTS[0])
            self.change = (lambda rows: npy(rows[:, :2])) if first else npy
            return super().__call__(body)

    with pytest.raises(MeasurementError, match=r"sizes \[2, 4\] and \[3, 4\], so of more than one"):
        opened(Two()).generate(batch(), Sampling(temperature=1.0), 0)


@pytest.mark.parametrize("layers", [1, 2, 6])
@pytest.mark.parametrize("picked", [1, 2, 4])
def test_experts_a_layer_are_told_from_rows_that_do_not_say_them(layers, picked):
    rng = np.random.default_rng(0)
    route = np.argsort(rng.random((511, layers, 16)))[..., :picked]
    assert routed_experts.experts_of_token(route.reshape(511, -1)) == picked
    if picked > 1:
        route[:, 0] = 0  # of a layer without a router
        assert layers == 1 or routed_experts.experts_of_token(route.reshape(511, -1)) == picked


def test_few_rows_do_not_tell_the_experts_of_a_layer(opened):
    """Then nothing is asked for, and the measurement goes on without routes."""
    assert routed_experts.experts_of_token(np.arange(8)[None]) is None

    class Short(SGLang):
        @property
        def pages(self):
            models = {"data": [{"id": "m", "max_model_len": 12}]}
            return {**super().pages, "/v1/models": models}

    made = Short()
    assert opened(made).generate(batch(), Sampling(temperature=1.0), 0).routes is None
    assert made.wanted[-1] is None


def test_bytes_that_are_no_numbers_are_refused():
    part = Part(base64.b64encode(b"abc").decode(), "x", "u", "/e")
    with pytest.raises(MeasurementError, match="has 3 bytes, which are no int32"):
        routed_experts.as_numbers(part, None, 3)
