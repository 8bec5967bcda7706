# Where a reference comes from: a kernel that is trusted, or an endpoint as it is today.

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from servanda.contract.model import Kernel
from servanda.engines import open_engine
from servanda.engines.base import Engine, verb_of
from servanda.engines.worker import spawn
from servanda.errors import ContractError
from servanda.runner.heartbeat.baseline import Baseline, Replay, plain
from servanda.runner.heartbeat.beat import REPLAYS, replayed
from servanda.runner.heartbeat.border import LOOKS, exact_borders, sampled_borders
from servanda.runner.heartbeat.endpoint import Ask, Endpoint
from servanda.theory.sampling import seed_of

_BITS = 31  # of a seed that servers take


@dataclass(frozen=True)
class RecordOptions:
    """How answers are drawn, and how many prompts are used.

    Args:
        candidates: prompts among which those of the border test are looked for; borders: of them.
        answers: prompts of the rank test and of replays.
        draws: of a kernel for each rank, or of an endpoint after each border prompt.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    border_temperature: float = 0.1
    width: int = 32
    draws: int = 31
    candidates: int = 256
    borders: int = 4
    answers: int = 16
    chat: bool = False
    seed: int = 0

    def requests(self, prompts: int) -> int:
        """What recording from an endpoint sends at most."""
        return LOOKS * min(self.candidates, prompts) + self.draws * self.borders + 2 * REPLAYS


def opened(kernel: Kernel) -> Engine:
    """A kernel in this process, or in the environment that it names."""
    return open_engine(kernel) if kernel.python is None else spawn(kernel, "reference")


def prompt_ids(engine: Engine, prompts: Sequence[str], chat: bool) -> list[tuple[int, ...]]:
    """Token ids of prompts as an endpoint is sent them.

    Raises:
        ContractError: a prompt without a token.
        MeasurementError: a chat, and the model has no template.
    """
    texts = list(prompts)
    if chat:
        render = verb_of(engine, "render")
        texts = [render([{"role": "user", "content": text}]) for text in texts]
    found = [tuple(ids) for ids in engine.encode(texts)]
    for text, ids in zip(prompts, found, strict=True):
        if not ids:
            raise ContractError(f"the prompt {text!r} has no token", hint="leave it out")
    return found


def from_kernel(
    source: str, kernel: Kernel, prompts: Sequence[str], how: RecordOptions
) -> Baseline:
    """A reference with exact probabilities."""
    engine = opened(kernel)
    try:
        texts = list(prompts[: how.candidates])
        ids = prompt_ids(engine, texts, how.chat)
        borders = exact_borders(engine, kernel, texts, ids, how.border_temperature, how.borders)
    finally:
        engine.close()
    return Baseline(
        source,
        True,
        "",
        how.chat,
        how.temperature,
        how.top_p,
        how.border_temperature,
        how.width,
        how.draws,
        tuple(texts[: how.answers]),
        borders,
    )


def from_endpoint(
    source: str,
    kernel: Kernel,
    prompts: Sequence[str],
    how: RecordOptions,
    seeds: bool,
    told: Callable[[int], None],
) -> Baseline:
    """A reference of draws, and of answers to seeds.

    Args:
        seeds: whether requests have seeds; told: is given the number of requests so far.
    """
    sent = 0

    def count() -> None:
        nonlocal sent
        sent += 1
        told(sent)

    endpoint = Endpoint(kernel, chat=how.chat, count=count)
    try:
        texts = list(prompts[: how.candidates])
        endpoint.refuse_disobedient(texts, how.width)

        def draw(prompt: str, number: int) -> str:
            seed = seed_of(how.seed, "heartbeat record", number, _BITS) if seeds else None
            return endpoint.ask(Ask(prompt, 1, how.border_temperature, 1.0, seed))

        held = Baseline(
            source,
            False,
            endpoint.served,
            how.chat,
            how.temperature,
            how.top_p,
            how.border_temperature,
            how.width,
            0,
            tuple(texts[: how.answers]),
            sampled_borders(draw, texts, how.borders, how.draws),
        )
        replays: list[Replay] = []
        for row in range(REPLAYS if seeds else 0):
            prompt = held.prompts[row % len(held.prompts)]
            seed = seed_of(how.seed, "heartbeat replay", row, _BITS)
            first, again = (plain(endpoint.ask(replayed(held, prompt, seed))) for _ in range(2))
            replays.append(Replay(prompt, seed, first, first == again))
    finally:
        endpoint.close()
    return Baseline(**{**vars(held), "replays": tuple(replays)})
