# The tokenizer of a checkpoint in GGUF, as far as llama.cpp has one like it.
#
# Token ids are what kernels speak: a file whose texts llama.cpp cannot cut is a whole kernel.
# It then says so (servanda.tokenizes false), and its texts are cut by tokenizer.json.

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gguf import GGUFWriter, TokenType

# name in llama.cpp -> pattern of a Split before bytes
_SPLITS = {
    "llama-bpe": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}


def token_ids(tokenizer: Mapping[str, Any]) -> dict[str, int]:
    """Token -> id of a tokenizer.json, with the tokens that were added to its model."""
    vocab = (tokenizer.get("model") or {}).get("vocab") or {}
    pairs = (
        vocab.items() if isinstance(vocab, Mapping) else ((t[0], i) for i, t in enumerate(vocab))
    )
    return {**dict(pairs), **{t["content"]: t["id"] for t in tokenizer.get("added_tokens") or ()}}


def pre_tokenizer(tokenizer: Mapping[str, Any]) -> str | None:
    """What llama.cpp calls the way texts are cut before byte-level BPE; None: not one it has."""
    model = tokenizer.get("model") or {}
    plain = not any(
        model.get(key)
        for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
    )
    steps = _steps(tokenizer.get("pre_tokenizer"))
    if model.get("type") != "BPE" or not plain or not steps or steps[-1]["type"] != "ByteLevel":
        return None
    normalizer = tokenizer.get("normalizer")
    if steps[-1].get("add_prefix_space"):
        return None
    before = steps[:-1]
    if steps[-1].get("use_regex", True):
        if normalizer is not None or model.get("ignore_merges"):
            return None
        if not before:
            return "gpt-2"
        alone = before == [{"type": "Digits", "individual_digits": True}]
        return "smollm" if alone else None
    if len(before) == 1 and before[0]["type"] == "Split" and not before[0].get("invert"):
        pattern = (before[0].get("pattern") or {}).get("Regex")
        name = next((name for name, split in _SPLITS.items() if split == pattern), None)
        if bool(model.get("ignore_merges")) != (name == "llama-bpe"):
            return None
        # Qwen's texts are normalised (NFC), which llama.cpp leaves to whoever sends them
        return name if normalizer is None or normalizer == {"type": "NFC"} else None
    return None


def _steps(pre: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if pre is None:
        return []
    return list(pre["pretokenizers"]) if pre["type"] == "Sequence" else [pre]


def write_tokenizer(
    writer: GGUFWriter,
    tokenizer: Mapping[str, Any],
    config: Mapping[str, Any],
    eos: tuple[int, ...],
) -> None:
    """Add vocabulary, merges and special ids; a model without byte-level BPE has ids alone."""
    name = pre_tokenizer(tokenizer)
    writer.add_bool("servanda.tokenizes", name is not None)
    if name is None:
        writer.add_tokenizer_model("no_vocab")
        return
    size = config["vocab_size"]
    tokens = [f"<{i}>".encode() for i in range(size)]  # an id without a token is never drawn
    types = [TokenType.UNUSED] * size
    added = {t["id"]: t for t in tokenizer.get("added_tokens") or ()}
    for token, i in token_ids(tokenizer).items():
        if i < size:
            tokens[i], types[i] = token.encode(), TokenType.NORMAL
            if i in added:
                special = added[i].get("special")
                types[i] = TokenType.CONTROL if special else TokenType.USER_DEFINED
    merges = tokenizer["model"].get("merges") or []
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(name)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
    if eos:
        writer.add_eos_token_id(eos[0])
    for key, add in (
        ("bos_token_id", writer.add_bos_token_id),
        ("pad_token_id", writer.add_pad_token_id),
    ):
        if isinstance(config.get(key), int):
            add(config[key])
    writer.add_add_bos_token(False)
    writer.add_add_eos_token(False)
