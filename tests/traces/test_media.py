# Images, video and sound: each place that a prompt may come in by says that it does not read them.

import json

import pytest

from servanda.engines.server import parse
from servanda.engines.server.parse import RequestError
from servanda.errors import ContractError
from servanda.traces.corpus import NOT_READ, Corpus, is_medium

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
PARTS = [
    IMAGE,
    {"type": "input_image", "image_url": "https://example.org/a.png"},
    {"type": "image", "image": "a.png"},
    {"type": "video", "video": "a.mp4"},
    {"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}},
    {"type": "file", "file": {"file_id": "a"}},
]
ids = lambda part: part["type"]  # noqa: E731


def refused(line):
    with pytest.raises(ContractError) as told:
        Corpus.parse(line, "p.jsonl")
    return str(told.value)


@pytest.mark.parametrize("part", PARTS, ids=ids)
def test_a_line_of_prompts_with_another_part_is_refused_with_its_place(part):
    chat = [{"role": "user", "content": [{"type": "text", "text": "what is this?"}, part]}]
    for line in ({"messages": chat}, {"prompt": chat[0]["content"]}):
        said = refused(json.dumps(line))
        assert f"{part['type']!r}: {NOT_READ}" in said
        assert "p.jsonl:1" in said
        assert said.endswith("hint: leave out the prompts that have them")


@pytest.mark.parametrize("key", ["images", "image", "videos", "audio", "multi_modal_data"])
def test_a_line_with_images_beside_its_prompt_is_refused(key):
    assert f"{key!r}: {NOT_READ}" in refused(f'{{"prompt": "a", "{key}": ["a.png"]}}')


def test_a_chat_of_texts_is_still_told_to_render_them():
    line = '{"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}'
    assert "need a chat template" in refused(line)


@pytest.mark.parametrize("part", PARTS, ids=ids)
def test_the_kernel_server_refuses_a_chat_with_another_part(part):
    text = {"type": "text", "text": "what is this?"}
    body = {"messages": [{"role": "user", "content": [text, part]}]}
    with pytest.raises(RequestError) as told:
        parse.chat(body, "m")
    assert (str(told.value), told.value.param, told.value.status) == (
        f"messages have a part of type {part['type']!r}: {NOT_READ}",
        "messages",
        400,
    )
    assert parse.chat({"messages": [{"role": "user", "content": [text]}]}, "m").messages


def test_the_kernel_server_refuses_images_beside_a_prompt():
    with pytest.raises(RequestError, match="images, video and sound are not read"):
        parse.completion({"prompt": "a", "multi_modal_data": {"image": "a"}}, "m")


def test_names_of_numbers_are_no_media():
    assert not any(map(is_medium, ("token_ids", "labels", "group", "answer", "rewards", "mask")))
