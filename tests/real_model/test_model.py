# A real language model: its conversion beside other readers of the same file, and what Servanda
# says of it.

import json
import re
import warnings
from pathlib import Path

import numpy as np
import pytest
from scripts import real_model

from tests.kit import servanda
from tests.real_model.conftest import loaded

ROOT = Path(__file__).parents[2]
PROMPTS = ROOT / "examples" / "real-model" / "prompts.jsonl"
PLAIN = (
    "The sun rises in the east and sets in the west.",
    "Paris is the capital of France, and Rome is the capital of Italy.",
    "In winter the days are short and the nights are long and cold.",
    "We went to the market early in the morning to buy bread, milk, and fresh fruit.",
)
# nats per token of PLAIN, by llama.cpp (llama-cpp-python 0.3.36) from the GGUF itself
LLAMA_CPP_NATS = 2.494
TEXTS = (
    *PLAIN,
    "Straße, naïve, 日本語, emoji 🙂, and a tab\there.\n\n  Two spaces.",
    "def f(x):\n    return {'a': x ** 2, \"b\": [1, 23, 456]}  # 7890\n",
    "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n",
)


@pytest.fixture(scope="session")
def gguf(folder):
    """The metadata of the GGUF, by its own reader."""
    from gguf import GGUFReader

    return GGUFReader(folder / real_model.GGUF).fields


def logits(model, ids):
    """Of one text, [T, V] in float32."""
    import torch

    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0].float()


def test_every_file_has_its_digest(folder):
    assert {real_model.GGUF, real_model.FLOAT32, real_model.BFLOAT16, real_model.LONG} <= {
        *real_model.ready_parts(folder)
    }


# the conversion


def test_the_conversion_has_the_logits_of_the_gguf_read_directly(folder, model, tokenizer):
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        direct = loaded(folder, "float32", gguf_file=real_model.GGUF)
    for text in TEXTS:
        ids = tokenizer(text).input_ids
        assert torch.equal(logits(model, ids), logits(direct, ids)), text


def test_plain_english_is_as_likely_as_llama_cpp_says(model, tokenizer):
    nats = tokens = 0
    for text in PLAIN:
        ids = tokenizer(text).input_ids
        logp_TV = logits(model, ids).double().log_softmax(-1)
        nats -= sum(float(logp_TV[at, token]) for at, token in enumerate(ids[1:]))
        tokens += len(ids) - 1
    assert tokens == 56 and nats / tokens == pytest.approx(LLAMA_CPP_NATS, abs=0.05)


def test_bfloat16_is_float32_rounded_and_moves_the_distribution_as_much_as_was_measured(
    folder, model, tokenizer
):
    import torch

    half = loaded(folder / "bfloat16", "bfloat16")
    for (name, a), (other, b) in zip(
        model.state_dict().items(), half.state_dict().items(), strict=True
    ):
        assert name == other and torch.equal(a.to(torch.bfloat16), b), name
    tv = [
        (logits(model, ids).softmax(-1) - logits(half, ids).softmax(-1)).abs().sum(-1) / 2
        for ids in (tokenizer(text).input_ids for text in PLAIN)
    ]
    tv_N = torch.cat(tv)
    # .0215 and .140 where this was written, of 60 positions; float16 moves it a tenth as much, and
    # processors with bfloat16 instructions round elsewhere
    assert 0.010 < float(tv_N.mean()) < 0.035
    assert float(tv_N.max()) < 0.3


# the tokenizer


def test_the_tokenizer_is_that_of_the_gguf(tokenizer, gguf):
    tokens = gguf["tokenizer.ggml.tokens"].contents()
    assert tokenizer.convert_ids_to_tokens(range(len(tokens))) == tokens
    assert len(tokenizer) == len(tokens) == 49_152
    for name, ours in (("bos", "bos"), ("eos", "eos"), ("unknown", "unk"), ("padding", "pad")):
        stated = gguf[f"tokenizer.ggml.{name}_token_id"].contents()
        assert getattr(tokenizer, f"{ours}_token_id") == stated


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_survives_its_tokens(tokenizer, text):
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text


def test_the_chat_template_is_that_of_the_gguf(tokenizer, gguf):
    assert tokenizer.chat_template == gguf["tokenizer.chat_template"].contents()


def test_the_prompts_are_what_the_chat_template_renders(tokenizer):
    chats = 0
    for line in map(json.loads, PROMPTS.read_text(encoding="utf-8").splitlines()):
        prompt = line["prompt"]
        if not prompt.startswith("<|im_start|>"):
            assert "<|im_start|>" not in prompt
            continue
        turns = re.findall(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>\n", prompt, re.DOTALL)
        messages = [{"role": role, "content": content} for role, content in turns]
        rendered = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )
        assert rendered == prompt
        chats += 1
    assert chats == 36


# the prompts


def test_most_series_and_sums_are_continued_rightly(model, tokenizer):
    import torch

    right = {}
    for line in map(json.loads, PROMPTS.read_text(encoding="utf-8").splitlines()):
        if "answer" in line and "<|im_start|>" not in line["prompt"]:
            ids = torch.tensor([tokenizer(line["prompt"]).input_ids])
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False
            )
            right[line["prompt"]] = line["answer"] in tokenizer.decode(out[0, ids.shape[1] :])
    assert len(right) == 7 and sum(right.values()) >= 4, right


def test_the_long_prompts_fit_with_their_responses(folder, tokenizer):
    lines = [json.loads(line) for line in (folder / real_model.LONG).read_text().splitlines()]
    lengths = [len(line["token_ids"]) for line in lines]
    assert lengths == [n for n in (1024, 2048, 4096, 8064) for _ in range(4)]
    for line in lines:
        text = tokenizer.decode(line["token_ids"])
        assert re.findall(r"Zora left the hourglass at the (\w+)\.", text) == [line["answer"]]
        assert line["labels"]["domain"] == "retrieval"


# what Servanda says


def test_a_prompt_beyond_the_context_is_refused_by_its_line(folder, tmp_path):
    lines = [{"prompt": "Hello"}, {"token_ids": [504] * 8193}]
    (tmp_path / "long.jsonl").write_text("\n".join(map(json.dumps, lines)))
    kernel = f"transformers:{folder / 'float32'}@float32"
    done = servanda(
        "tools", "measure", kernel, "--prompts", str(tmp_path / "long.jsonl"),
        "-o", str(tmp_path / "x.pack"),
    )  # fmt: skip
    assert done.exit_code == 2
    assert (
        "long.jsonl:2:1: a prompt of 8193 tokens and 64 new ones exceeds the context of 8192"
        in (done.stderr)
    )
    assert "hint: shorten or drop the line, or lower max_new_tokens" in done.stderr


def test_another_tokenizer_is_refused(folder, tmp_path):
    (tmp_path / "one.jsonl").write_text('{"prompt": "Once upon"}')
    real, tiny = folder / "float32", ROOT / "models" / "tiny-lm"
    for a, b in ((real, tiny), (tiny, real)):
        done = servanda(
            "compare", f"transformers:{a}@float32", f"transformers:{b}@float32",
            "--prompts", str(tmp_path / "one.jsonl"), "--max-new-tokens", "2", "--quiet",
        )  # fmt: skip
        assert done.exit_code == 4
        assert re.match(r"the tokenizers differ: train has \d+ ids .*, infer has \d+", done.stderr)
        assert {*re.findall(r"has (\d+)", done.stderr)} == {"49152", "1024"}
        assert "hint: a token id must mean the same on both sides" in done.stderr


# the copy that was trained on


@pytest.fixture(scope="session")
def trained(folder):
    if not (folder / real_model.TRAINED).is_file():
        pytest.skip("the trained copy is not here: make real-model-trained")
    return loaded(folder / "trained", "float32")


def test_the_weights_of_the_gguf_lie_on_a_grid_and_those_of_the_trained_copy_do_not(model, trained):
    assert real_model.on_grid(model.state_dict()) > 0.999
    assert real_model.on_grid(trained.state_dict()) < real_model.ON_GRID_AT_MOST


def test_training_lowered_the_loss_of_texts_that_it_did_not_see(folder, model, trained, tokenizer):
    import torch

    held_out_RT = torch.from_numpy(real_model.rows("held-out", tokenizer)[:3])
    before = real_model.held_out_loss(model, held_out_RT)
    assert real_model.held_out_loss(trained, held_out_RT) < before
    about = json.loads((folder / "trained" / "training.json").read_text())
    assert about["held_out_nats_after"] < about["held_out_nats_before"]
    assert np.isfinite(before) and about["steps"] == real_model.STEPS
