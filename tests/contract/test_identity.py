# What both descriptions know is compared: refused where a token or a weight means something else,
# and said where it changes what is drawn or how far.

from dataclasses import replace

import pytest

from servanda.contract.identity import DEFAULT, Description, differences, same_policy
from servanda.errors import IdentityError

CONFIG = {
    "bos_token_id": "0",
    "pad_token_id": "1",
    "rope_theta": "10000.0",
    "max_position_embeddings": "512",
    "rms_norm_eps": "1e-06",
}
ONE = Description(
    fingerprint={"engine": "vllm_server", DEFAULT + "temperature": "0.6"},
    tensors={"a": "11", "b": "22"},
    tokens="t0",
    vocab_size=64,
    eos=(2,),
    context=512,
    config=CONFIG,
)


def told(**values):
    return replace(ONE, config={**CONFIG, **values})


REFUSED = {
    "the tokenizer": (replace(ONE, tokens="t1"), "the tokenizers differ"),
    "the rows of the vocabulary": (replace(ONE, vocab_size=63), "the tokenizers differ"),
    "the names of the tensors": (replace(ONE, tensors={"a": "11"}), "'b' is on one side only"),
    "a tensor": (replace(ONE, tensors={"a": "11", "b": "23"}), "1 of 2 tensors, first 'b'"),
}
SAID = {
    "the ends": (replace(ONE, eos=(2, 7)), "end a response differ (train / infer): 2 / 2, 7"),
    "the longest sequence": (replace(ONE, context=128), "sequences differ (train / infer): 512 /"),
    "a vocabulary without its tokens": (
        replace(ONE, tokens="", vocab_size=63),
        "sizes of the vocabulary differ (train / infer): 64 / 63",
    ),
    "the first id": (told(bos_token_id="5"), "bos_token_id 0 / 5"),
    "the id of padding": (told(pad_token_id="2"), "pad_token_id 1 / 2"),
    "positions": (told(rope_theta="500000.0"), "rope_theta 10000.0 / 500000.0"),
    "a constant": (told(rms_norm_eps="1e-05"), "rms_norm_eps 1e-06 / 1e-05"),
    "a default of the server": (
        replace(ONE, fingerprint={**ONE.fingerprint, DEFAULT + "temperature": "1.0"}),
        "sampling defaults differ (train / infer): temperature 0.6 / 1.0",
    ),
}


@pytest.mark.parametrize("fact", REFUSED)
def test_what_makes_a_token_or_a_weight_another_one_is_refused(fact):
    other, text = REFUSED[fact]

    with pytest.raises(IdentityError, match=r"differ|other") as found:
        same_policy(ONE, other)

    assert text in found.value.problems[0].message and found.value.problems[0].hint


@pytest.mark.parametrize("fact", SAID)
def test_what_else_differs_is_said_with_both_values(fact):
    other, text = SAID[fact]

    lines = differences(ONE, other)

    assert any(text in line for line in lines), lines
    assert differences(ONE, ONE) == differences(other, other) == ()


def test_what_a_side_does_not_know_is_no_difference():
    silent = Description({}, {}, "", 0, ())

    assert differences(ONE, silent) == differences(silent, ONE) == ()
    assert same_policy(ONE, silent) == "declared"


def test_weights_made_from_others_are_refused():
    made = replace(ONE, tensors={}, weights_from="0123456789")

    with pytest.raises(IdentityError, match="a divergence would mix kernel and weights"):
        same_policy(ONE, made)
    assert same_policy(ONE, replace(made, weights_from=ONE.weights)) == "derived"
