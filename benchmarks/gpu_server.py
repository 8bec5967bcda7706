"""An engine in a process of its own that takes its weights by CUDA IPC.

The trainer's process sends handles of its own tensors, and no bytes: the engine's process opens
them and copies on the device, as vLLM and SGLang are synced where both run on one GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, multiprocessing

Rows = list[list[int]]
_PATIENCE_S = 600.0


class ServedByIpc:
    """The other process; `load` and `score` are those of a trainee's sync and engine.

    Args:
        opened: makes the engine's model, in the other process; it can be pickled.
        load: of that model, what takes over named tensors.
    """

    def __init__(
        self,
        opened: Callable[[], Any],
        load: Callable[[Any, Iterable[tuple[str, Tensor]]], set[str]],
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._to, self._back = context.Queue(), context.Queue()
        self._process = context.Process(
            target=_served, args=(self._to, self._back, opened, load), daemon=True
        )
        self._process.start()
        self._answer()

    def load(self, named: Iterable[tuple[str, Tensor]]) -> set[str]:
        held = [*named]  # until the other process has copied them
        self._to.put(("load", held))
        return self._answer()

    def score(self, rows: Rows) -> Any:
        self._to.put(("score", rows))
        return self._answer()

    def close(self) -> None:
        self._to.put(("close", None))
        self._process.join(_PATIENCE_S)

    def _answer(self) -> Any:
        answer, problem = self._back.get(timeout=_PATIENCE_S)
        if problem:
            raise RuntimeError(f"the engine's process: {problem}")
        return answer


def _served(inbox: Any, back: Any, opened: Any, load: Any) -> None:
    import torch

    from servanda.rl.sync_drill.trainee import forward_logprobs

    model, verb, given = None, "open", None
    while verb != "close":
        try:
            if model is None:
                model, answer = opened(), None
            elif verb == "load":
                answer = load(model, given)
                torch.cuda.synchronize()
            else:
                answer = forward_logprobs(model, given)
            back.put((answer, ""))
        except Exception as error:  # whatever it is, the trainer's process shows it
            back.put((None, f"{type(error).__name__}: {error}"))
        given = None  # closes the handles
        verb, given = inbox.get()
