# The vocabulary: the scored tokens, and the rows of its tensors that they test.

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

ENDS = 6  # ids at each end of the vocabulary that are probed several times
_SHARDS = 16  # equal parts of it, which usually include the shards of tensor-parallel engines
_TAILS = (32, 64, 128, 256)  # the last 1/32 and so on: padding, and added tokens


def drawn(known: int, named: Sequence[int], rows: int, tokens: int, seed: int) -> list[list[int]]:
    """Sample tokens evenly from the vocabulary, and several times from its ends.

    Converters tend to lose the ends: padding to a multiple, a last shard, added tokens.

    Args:
        known: ids below it are tokens.
        named: further ids that count as ends.

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
    """The vocabulary size from config and embedding; None if both lack it."""
    config = getattr(module, "config", None)
    sizes = []
    if config is not None:
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        sizes.append(getattr(text, "vocab_size", None))
    if hasattr(module, "get_input_embeddings"):
        sizes.append(getattr(module.get_input_embeddings(), "num_embeddings", None))
    return min((size for size in sizes if isinstance(size, int) and size > 1), default=None)


def named_ids(module: Any, known: int) -> list[int]:
    """Special ids in a model's config: begin and end of a text, padding."""
    ends: set[int] = set()
    for config in (getattr(module, "config", None), getattr(module, "generation_config", None)):
        for key in ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"):
            value = getattr(config, key, None)
            ids = value if isinstance(value, list) else [value]
            ends.update(token for token in ids if isinstance(token, int) and token < known)
    return sorted(ends)[: 2 * ENDS]


def ranges(size: int, named: Sequence[int], probed: Sequence[int]) -> list[tuple[int, int]]:
    """Distinguished ranges of vocabulary rows, [from, to), with at least one probe.

    The first, the last and the named rows are separate, so that a small loss at an end is a
    complete range.

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
    """The ranges for a module and the scored rows."""
    probed = sorted({token for row in rows for token in row})
    size = size_of(module) or probed[-1] + 1
    return ranges(size, named_ids(module, size), probed)
