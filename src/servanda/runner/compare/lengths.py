# Lengths: of the prompts of a comparison, and of a few answers that it does not judge.

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from servanda.contract.identity import digest_of
from servanda.contract.workload import WorkloadSampling
from servanda.runner.compare.sides import Sides
from servanda.runner.probe import Engines, encoded
from servanda.runner.round_files import in_order
from servanda.theory.sampling import uniforms
from servanda.traces.corpus import Corpus
from servanda.traces.trace import Batch

_LOOKS = 32  # answers that are drawn to see how long they are
DREW = "Tokens of the answers that were drawn to choose depths:"


def prompts(corpus: Corpus, sides: Sides, engines: Engines) -> Sequence[Sequence[int]]:
    """Token ids of every line."""
    if sides.pack is not None:
        return sides.pack.tokens["prompts"]
    return encoded(corpus, engines.get(sides.infer, "infer"))


def answers(
    kept: Path,
    ids: Sequence[Sequence[int]],
    sampling: WorkloadSampling,
    sides: Sides,
    engines: Engines,
) -> tuple[int, ...]:
    """Tokens of a few answers of infer, by which depths are chosen; the run judges none of them.

    Those of a pack are its first ones, of which nothing but the length is looked at.  A run that
    is continued keeps the depths that it began with: a server may draw others the next time.
    """
    if kept.is_file():
        before = re.search(rf"(?m)^# {DREW} ([\d ]+)$", kept.read_text(encoding="utf-8"))
        if before:
            return tuple(map(int, before[1].split()))
    if sides.pack is not None:
        drawn = sides.pack.drawn
        lengths = drawn.length_S[~drawn.lost_S][:_LOOKS]
        return tuple(lengths.tolist()) or (sampling.max_new_tokens,)
    seed = int(digest_of(["depths", sampling.seed])[:15], 16)  # noise that no round has
    rows = [int(u * len(ids)) for u in uniforms(seed, "prompt", 0, _LOOKS)]
    batch = Batch(
        tuple(range(_LOOKS)), tuple(tuple(ids[r]) for r in rows), sampling.max_new_tokens, ()
    )
    infer = engines.get(sides.infer, "infer")
    drawn = in_order(batch, infer.generate, sampling.transform, seed)
    lengths = drawn.length_S[~drawn.lost_S]
    return tuple(lengths.tolist()) or (sampling.max_new_tokens,)
