# Border inputs: prompts after which two first texts are nearly equally likely.
#
# There a small change of the logits moves the distribution most, the more so at a low temperature.
# Source: Token-Efficient Change Detection in LLM APIs, arXiv 2602.11083.

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np

from servanda.contract.model import Kernel
from servanda.engines.base import Engine
from servanda.errors import MeasurementError
from servanda.runner.heartbeat.baseline import Border, plain
from servanda.theory.sampling import Sampling, processed_logprobs
from servanda.traces.trace import Batch

T = TypeVar("T")
_LEAST = 0.03  # probability of a text that is a class of its own
_MOST = 6  # classes, any other text left out
LOOKS = 6  # draws after each prompt, to choose prompts and classes by


def exact_borders(
    engine: Engine,
    kernel: Kernel,
    prompts: Sequence[str],
    ids: Sequence[tuple[int, ...]],
    temperature: float,
    size: int,
) -> tuple[Border, ...]:
    """The `size` prompts whose second text is most probable, with a kernel's probabilities."""
    about = engine.describe()
    words = [plain(word) for word in engine.decode([[i] for i in range(about.vocab_size)])]
    for end in about.eos:
        words[end] = ""
    names, class_V = np.unique(words, return_inverse=True)
    batch = Batch(tuple(range(len(ids))), tuple(ids), 1, ((0,),) * len(ids))
    sampling = Sampling(temperature=temperature)  # type: ignore[call-arg]
    found: list[Border] = []
    for logits_RV in engine.logits(batch, kernel.path or "decode"):
        p_RV = np.exp(processed_logprobs(logits_RV, sampling))
        for p_V in p_RV:
            p_C = np.bincount(class_V, p_V, minlength=len(names))
            best = [c for c in np.argsort(-p_C)[:_MOST].tolist() if p_C[c] >= _LEAST]
            shown = tuple(float(p_C[c]) for c in best)
            rest = max(0.0, 1.0 - sum(shown))
            prompt = prompts[len(found)]
            found.append(Border(prompt, tuple(str(names[c]) for c in best), (*shown, rest)))
    return _nearest([one for one in found if len(one.classes) > 1], lambda one: one.p[1], size)


def sampled_borders(
    draw: Callable[[str, int], str], prompts: Sequence[str], size: int, draws: int
) -> tuple[Border, ...]:
    """The same from draws of an endpoint: LOOKS of each prompt to choose, and then fresh ones.

    The first draws chose prompts and classes, so they are no sample of what these answer.

    Args:
        draw: the first text after a prompt, by the number of the request.
    """
    asked = 0

    def drawn(prompt: str, times: int) -> Counter[str]:
        nonlocal asked
        asked += times
        return Counter(plain(draw(prompt, n)) for n in range(asked - times, asked))

    looked = [(prompt, drawn(prompt, LOOKS).most_common(_MOST)) for prompt in prompts]
    several = [(prompt, found) for prompt, found in looked if len(found) > 1]
    borders = []
    for prompt, found in _nearest(several, lambda one: one[1][1][1], size):
        border = Border(prompt, tuple(text for text, _ in found))
        fresh = drawn(prompt, draws)
        counts = [0] * (len(found) + 1)
        for text, n in fresh.items():
            counts[border.answer(text)] += n
        borders.append(replace(border, draws=tuple(counts)))
    return tuple(borders)


def _nearest(found: Sequence[T], second: Callable[[T], float], size: int) -> tuple[T, ...]:
    """Those with the largest second share.

    Raises:
        MeasurementError: there is none.
    """
    if not found:
        raise MeasurementError(
            "after every prompt one first text is certain: no change of it can be seen",
            hint="raise --temperature, or name other --prompts, such as the beginnings of texts",
        )
    return tuple(sorted(found, key=second, reverse=True)[:size])
