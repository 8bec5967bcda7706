# Two servers before their kernels: real ones, in threads, whose tokenizers and templates differ.

from __future__ import annotations

import contextlib
import json

import pytest
from click.testing import CliRunner

from servanda.cli import main
from servanda.contract.model import Kernel
from servanda.engines.http import HTTPEngine
from servanda.engines.table import TableEngine
from servanda.errors import MeasurementError
from servanda.runner.compare.surface import (
    TOOL_PROMPTS,
    Client,
    compare_layers,
    conclusion,
    differs,
    lines,
)

pytest.importorskip("uvicorn")
from tests.engines.serving import live, table_engine

WORDS = [*"abcdefghijklmnopqrstuvwx", "<eos>"]
ZIPF = [1 / rank for rank in range(1, 26)]
ROWS = {"": [share / sum(ZIPF) for share in ZIPF]}  # with a tail that a top-p cuts


class Chatty(TableEngine):
    """Encodes any text, and has a chat template: a mark and the role, then the words."""

    mark, stride = "", 1

    def encode(self, texts):
        size = len(self.table.tokens) - 1
        return [[ord(letter) * self.stride % size for letter in text] for text in texts]

    def render(self, messages, tools=None):
        said = "".join(f"{self.mark}{m['role']}:{m['content']};" for m in messages)
        return json.dumps(tools) + said if tools else said


class Marked(Chatty):
    mark = "<new>"


class OtherTokens(Chatty):
    stride = 3


class Mute(Chatty):
    def render(self, messages, tools=None):
        raise MeasurementError("no chat template")


class Calling(Chatty):
    """Its server answers every prompt with one call of a tool."""

    arguments = '{"city": "Oslo"}'

    @classmethod
    def behind(cls, app):
        function = {"name": "get_weather", "arguments": cls.arguments}
        message = {"tool_calls": [{"type": "function", "function": function}]}
        body = json.dumps({"choices": [{"message": message}]}).encode()

        async def calls(scope, receive, send):
            if scope.get("path") == "/v1/chat/completions":
                await send({"type": "http.response.start", "status": 200, "headers": []})
                await send({"type": "http.response.body", "body": body})
            else:
                await app(scope, receive, send)

        return calls


class Careless(Calling):
    arguments = "{}"


@contextlib.contextmanager
def doors(tmp_path, a, b):
    """The two doors, and their urls."""
    with contextlib.ExitStack() as stack:
        found = []
        for name, kind in (("A", a), ("B", b)):
            (tmp_path / name).mkdir()
            behind = getattr(kind, "behind", None)
            client, _ = stack.enter_context(
                live(table_engine(tmp_path / name, ROWS, WORDS, cls=kind), locked=behind)
            )
            url = str(client.base_url).rstrip("/")
            engine = HTTPEngine(Kernel(engine="openai_http", url=url))
            stack.callback(engine.close)
            found.append(Client(name, engine))
        yield tuple(found)


def looked(tmp_path, a, b):
    with doors(tmp_path, a, b) as (first, second):
        return {f.layer: f for f in compare_layers(first, second, ["a text of the workload"])}


@pytest.mark.slow
def test_equal_servers_are_equal_on_every_layer(tmp_path):
    found = looked(tmp_path, Chatty, Chatty)
    assert not differs(found.values())
    assert found["tokenizer"].text == "prompt ids of 9 of 9 texts are equal"
    assert found["chat template"].outcome == "same"
    assert found["tool calls"].text == "the model calls no tool on either server"


@pytest.mark.slow
def test_a_changed_template_is_named_and_the_first_token_that_differs(tmp_path):
    found = looked(tmp_path, Chatty, Marked)
    odd = differs(found.values())
    assert [f.layer for f in odd] == ["chat template"]
    assert odd[0].text.startswith("prompt ids of 0 of ")
    assert odd[0].first.startswith("one question: from token 0 on, A [")
    assert conclusion(odd).startswith("the chat template differs: clients get other responses")


@pytest.mark.slow
def test_other_tokenizers_end_the_comparison(tmp_path):
    found = looked(tmp_path, Chatty, OtherTokens)
    odd = differs(found.values())
    assert odd[0].layer == "tokenizer"
    assert "a token id does not mean the same on both servers" in conclusion(odd)


def test_a_template_on_one_side_only_is_a_difference(tmp_path):
    found = looked(tmp_path, Chatty, Mute)
    assert found["chat template"].outcome == "differs"
    assert "B refuses it" in found["chat template"].first


def test_without_templates_nothing_is_said_to_agree(tmp_path):
    found = looked(tmp_path, Mute, Mute)
    assert found["chat template"].outcome == "unknown"
    assert not differs(found.values())


@pytest.mark.slow
def test_calls_that_a_client_cannot_run_are_told(tmp_path):
    with doors(tmp_path, Calling, Careless) as (sound, careless):
        weather, add = TOOL_PROMPTS[0], TOOL_PROMPTS[1]
        assert sound.called(weather).calls == 1
        assert careless.called(weather).wrong == ("weather: get_weather without 'city'",)
        assert sound.called(add).wrong == ("sum: calls 'get_weather', which was not offered",)
        tools = [*compare_layers(sound, careless)][-1]
    assert tools.outcome == "differs"
    assert tools.text == "answers with calls that parse: A 5 of 6, B 0 of 6"


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "said"), [(Chatty, "✓"), (Marked, "✗")])
def test_the_lines_say_it_before_any_statistics(tmp_path, kind, said):
    with doors(tmp_path, Chatty, kind) as pair:
        text = [line for finding in compare_layers(*pair) for line in lines(finding)]
    assert text[0].startswith("servers   A: vllm")
    assert any(line.startswith(f"template  {said} ") for line in text)


class Filling(Chatty):
    """Its server says that it draws at 0.6 where a request names no temperature."""

    @classmethod
    def behind(cls, app):
        async def says(scope, receive, send):
            async def changed(message):
                body = message.get("body", b"")
                if scope.get("path") == "/servanda/describe" and body:
                    about = json.loads(body)
                    body = json.dumps({**about, "sampling_defaults": {"temperature": 0.6}}).encode()
                    message = {**message, "body": body}
                elif scope.get("path") == "/servanda/describe" and "headers" in message:
                    kept = [h for h in message["headers"] if h[0] != b"content-length"]
                    message = {**message, "headers": kept}
                await send(message)

            await app(scope, receive, changed)

        return says


def test_servers_that_tell_what_a_request_without_sampling_gets_are_compared(tmp_path):
    with doors(tmp_path, Chatty, Chatty) as pair:
        same = [*compare_layers(*pair)][1]
    (tmp_path / "other").mkdir()
    with doors(tmp_path / "other", Chatty, Filling) as pair:
        unlike = [*compare_layers(*pair)][1]

    assert (same.layer, same.outcome) == ("defaults", "same")
    assert unlike.outcome == "differs" and "temperature none and 0.6" in unlike.text


PROMPTS = [json.dumps({"token_ids": [0, 1]}), json.dumps({"token_ids": [1]})]


def compared(tmp_path, a, b, *options):
    prompts = tmp_path / "p.jsonl"
    prompts.write_text("\n".join(PROMPTS) + "\n")
    with doors(tmp_path, a, b) as pair:
        urls = [door.engine.transport.url for door in pair]
        asked = [*urls, "--prompts", str(prompts), "--run-dir", str(tmp_path / "run"), *options]
        asked += ["--max-new-tokens", "4", "--sequences", "768"]
        return CliRunner().invoke(main, ["compare", *asked])


@pytest.mark.slow
def test_compare_says_which_layer_differs_and_goes_on_to_the_kernels(tmp_path):
    result = compared(tmp_path, Chatty, Marked, "--bitwise")
    assert result.exit_code == 1
    assert "surface   ✗ the chat template differs" in result.output
    assert "exit      1, for the surface: chat template" in result.output
    assert "HOLDS" in result.output  # the kernels are one: the template is what changed


def test_compare_stops_where_token_ids_mean_other_things(tmp_path):
    result = compared(tmp_path, Chatty, OtherTokens)
    assert result.exit_code == 1
    assert "there is nothing to compare below" in result.output
    assert not (tmp_path / "run").exists()


def test_what_the_exit_code_stands_on_is_said_however_quiet(tmp_path):
    result = compared(tmp_path, Chatty, OtherTokens, "--quiet")
    assert result.exit_code == 1
    assert result.output.startswith("surface   ✗ ")
    assert "a token id does not mean the same on both servers" in result.output


@pytest.mark.slow
def test_selftest_holds_and_finds_what_is_asked_of_it(tmp_path):
    prompts = tmp_path / "p.jsonl"
    prompts.write_text("\n".join(PROMPTS) + "\n")
    with doors(tmp_path, Chatty, Chatty) as (door, _):
        asked = [door.engine.transport.url, "--prompts", str(prompts), "--max-new-tokens", "8"]
        result = CliRunner().invoke(main, ["tools", "selftest", *asked, "--quiet"])
    assert result.exit_code == 0, result.output
    told = result.output.splitlines()
    assert told[1].startswith("cost      3 parts, and of each: about ")
    assert [line[0] for line in told[2:5]] == ["✓", "✓", "✓"]
    assert "violated by" in told[3] and "violated by" in told[4]
