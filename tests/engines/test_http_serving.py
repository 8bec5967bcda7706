# What servers say of the requests of users: replies as vLLM 0.32 and llama-server b1-0c1e570 gave
# them, and SGLang's after its source of September 2026.

import pytest

from servanda.engines.http.dialects import DIALECTS, Server
from servanda.engines.http.dialects.llamacpp import LlamaCpp
from servanda.engines.http.responses import Part
from servanda.engines.http.transport import StatusError

MODELS = {"data": [{"id": "m", "max_model_len": 64, "meta": {"n_vocab": 9}}]}


class Told:
    """A server whose replies are written down; what is not there is refused."""

    url = "http://127.0.0.1:1"

    def __init__(self, **answers):
        self.answers, self.asked = answers, []

    def ask(self, endpoint, body=None, tokens=0):
        self.asked.append((endpoint, body))
        answer = self.answers.get(endpoint.strip("/").replace("/", "_"))
        found = answer(body) if callable(answer) else answer
        if found is None:
            raise StatusError("refused", status=400, text="no", hint="")
        return Part(found, "", self.url, endpoint)

    def maybe(self, endpoint):
        try:
            return self.ask(endpoint)
        except StatusError:
            return None


def serving(dialect, **answers):
    return DIALECTS[dialect]().serving(Told(**answers), Server("m", context=63))


def rendered(limit=None, masks=False):
    """vLLM's /v1/chat/completions/render of a chat of three tokens and 64 places."""

    def answer(body):
        params = {"max_tokens": min(61, limit or 61)}
        if masks and body.get("tools"):
            params["structured_outputs"] = {"json": None, "structural_tag": "{}"}
        return {"token_ids": [1, 2, 3], "sampling_params": params}

    return answer


@pytest.mark.parametrize(
    ("answer", "limit", "masks"),
    [
        (None, None, False),  # without --enable-scale-out
        (rendered(), None, False),  # what there is room for
        (rendered(20), 20, False),  # of a generation_config.json
        (rendered(masks=True), None, True),  # a parser with a grammar of its own
    ],
)
def test_vllm_tells_a_limit_and_a_grammar_where_it_renders_chats(answer, limit, masks):
    found = serving("vllm", v1_chat_completions_render=answer)

    assert (found.limit, found.masks, found.mute) == (limit, masks, frozenset())


def test_a_vllm_that_takes_no_tools_tells_its_limit_all_the_same():
    found = serving(
        "vllm",
        v1_chat_completions_render=lambda body: None if "tools" in body else rendered(20)(body),
    )

    assert (found.limit, found.masks) == (20, False)


def of_sglang(version):
    """Replies of a version: 0 knows no ids, 1 has #30917, 2 has #34488, too."""

    def completion(body):
        assert body["return_token_ids"] is True
        return {"choices": [{"index": 0, "text": "a", **({"token_ids": [5]} if version else {})}]}

    def chat(body):
        found = {"choices": [{"index": 0, **({"token_ids": [5]} if version else {})}]}
        if version > 1 and body.get("return_output_ids_in_sglext"):
            found["sglext"] = {"input_ids": [1], "output_ids": [[5]]}
        return found

    return {"v1_completions": completion, "v1_chat_completions": chat}


@pytest.mark.parametrize(
    ("version", "mute"),
    [
        (0, {"completions", "chats", "streamed chats"}),
        (1, {"streamed chats"}),
        (2, set()),
    ],
)
def test_sglang_is_asked_which_answers_come_with_token_ids(version, mute):
    assert serving("sglang", **of_sglang(version)).mute == mute


def test_an_sglang_without_a_chat_template_answers_no_chats():
    completions = of_sglang(2)["v1_completions"]

    assert serving("sglang", v1_completions=completions).mute == {"chats", "streamed chats"}


@pytest.mark.parametrize(
    ("more", "defaults"),
    [
        ({"sampling_defaults": "openai"}, {}),
        ({"sampling_defaults": "model"}, None),
        ({"sampling_defaults": "openai", "preferred_sampling_params": {"top_p": 0.5}}, None),
        ({}, None),
    ],
)
def test_the_defaults_of_sglang_are_known_where_they_are_openais(more, defaults):
    told = Told(
        get_model_info={"model_path": "x"},
        get_server_info={"version": "0.6", **more},
        v1_models=MODELS,
    )

    assert DIALECTS["sglang"]().meet(told, None).defaults == defaults


PARAMS = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "n_predict": -1,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repeat_penalty": 1.0,
    "typical_p": 1.0,
    "top_n_sigma": -1.0,
    "dry_multiplier": 0.0,
    "mirostat": 0,
}


def of_llama(**changes):
    """/props of a llama-server, and what else `meet` asks of it."""
    settings = {"n_ctx": 64, "params": {**PARAMS, **changes}}
    props = {"build_info": "b1", "total_slots": 1, "default_generation_settings": settings}
    return {"props": props, "v1_models": MODELS}


@pytest.mark.parametrize(
    ("changes", "defaults"),
    [
        ({}, {}),
        ({"temperature": 0.8, "top_k": 40}, {"temperature": 0.8, "top_k": 40}),
        # by no name that a client of another server would say otherwise
        ({"repeat_penalty": 1.1, "mirostat": 2}, {"repeat_penalty": 1.1, "mirostat": 2}),
    ],
)
def test_the_defaults_of_llama_server_are_those_of_its_props(changes, defaults):
    neutral = {name: PARAMS[name] for name in ("temperature", "top_k", "top_p", "min_p")}
    neutral |= {"presence_penalty": 0.0, "frequency_penalty": 0.0}

    found = LlamaCpp().meet(Told(**of_llama(**changes)), None)

    assert found.defaults == neutral | defaults


@pytest.mark.parametrize(("most", "limit"), [(-1, None), (32, 32)])
def test_the_limit_of_llama_server_is_the_one_that_it_was_started_with(most, limit):
    found = serving("llamacpp", **of_llama(n_predict=most))

    # a streamed chat lacks the token that ended it
    assert (found.limit, found.mute) == (limit, {"streamed chats"})


def test_of_a_plain_server_nothing_is_known():
    found = serving("plain")

    assert (found.limit, found.mute, found.masks) == (None, frozenset(), False)
