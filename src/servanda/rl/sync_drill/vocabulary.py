# The vocabulary: which tokens are scored, and which rows of its tensors they tell of.

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

ENDS = 6  # ids at either end of the vocabulary that are probed several times
_SHARDS = 16  # equal parts of it; what tensor-parallel engines cut it into is one of these, mostly
_TAILS = (32, 64, 128, 256)  # the last 1/32 and so on: padding, and tokens that were added


def drawn(known: int, named: Sequence[int], rows: int, tokens: int, seed: int) -> list[list[int]]:
    """Tokens from all of the vocabulary, evenly, and several times from its ends.

    Converters lose the ends first: padding to a multiple, a last shard, tokens that were added.

    Args:
        known: ids below it are tokens.
        named: ids that count as ends, too.

    >>> found = drawn(1000, [500], 4, 30, seed=0)
    >>> all(sum(row.count(id) for row in found) for id in (0, 500, 999))
    True
    """
    rng = np.random.default_rng(seed)
    ends = np.unique([*range(min(ENDS, known)), *range(max(0, known - ENDS), known), *named])
    often = np.resize(ends, rows * tokens // 6)
    count = rows * tokens - often.size
    even = ((np.arange(count) + rng.random(count)) * known / count).astype(int)
    return rng.permutation(np.concatenate([often, even])).reshape(rows, tokens).tolist()


def size_of(module: Any) -> int | None:
    """How many tokens both its config and its embedding know; None where neither says."""
    config = getattr(module, "config", None)
    sizes = []
    if config is not None:
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        sizes.append(getattr(text, "vocab_size", None))
    if hasattr(module, "get_input_embeddings"):
        sizes.append(getattr(module.get_input_embeddings(), "num_embeddings", None))
    return min((size for size in sizes if isinstance(size, int) and size > 1), default=None)


def named_ids(module: Any, known: int) -> list[int]:
    """Ids that a model's config names: where a text begins and ends, padding."""
    ends: set[int] = set()
    for config in (getattr(module, "config", None), getattr(module, "generation_config", None)):
        for key in ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"):
            value = getattr(config, key, None)
            ids = value if isinstance(value, list) else [value]
            ends.update(token for token in ids if isinstance(token, int) and token < known)
    return sorted(ends)[: 2 * ENDS]


def ranges(size: int, named: Sequence[int], probed: Sequence[int]) -> list[tuple[int, int]]:
    """Rows of a vocabulary that are told from one another, [from, to), where one was probed.

    The first, the last and the named ones by themselves, so that however little is lost at an
    end, all of a range is.

    >>> ranges(64, [], range(64))[-2:]
    [(62, 63), (63, 64)]
    """
    cuts = {0, 1, size - 1, size, *(size * k // _SHARDS for k in range(_SHARDS))}
    cuts |= {size - size // tail for tail in _TAILS}
    cuts |= {cut for token in named for cut in (token, token + 1)}
    edges = sorted(cut for cut in cuts if 0 <= cut <= size)
    known = np.unique(probed)
    return [(low, high) for low, high in pairwise(edges) if ((known >= low) & (known < high)).any()]


def ranges_of(module: Any, rows: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """The same, of a module and the rows of tokens that are scored."""
    probed = sorted({token for row in rows for token in row})
    size = size_of(module) or probed[-1] + 1
    return ranges(size, named_ids(module, size), probed)
