# Laws of what an engine refuses, and of its end.

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import asdict, replace

import numpy as np

from servanda.engines.conformance.base import FEW, LAWS, PLAIN, Broken, Case, Skipped, require
from servanda.errors import MeasurementError
from servanda.traces.trace import Batch

_PATIENCE_S = 60.0  # a closed engine that has not answered by then never will


@LAWS.register("misfits_are_refused_by_name")
def misfits_are_refused_by_name(case: Case) -> str:
    """A sequence that cannot be run is refused by its index, and the engine still works."""
    batch, before = case.drawn(n=FEW)
    description = case.description
    name = batch.sequence_S[1]
    misfits: list[tuple[str, Batch]] = []
    if description.vocab_size:
        misfits.append(("the id of no token", _with(batch, (description.vocab_size,))))
        misfits.append(("an id below 0", _with(batch, (-1,))))
    if description.context is not None:
        long = case.prompts[0][:1] * description.context
        misfits.append(("a prompt as long as the context", _with(batch, long)))
    for what, odd in misfits:
        try:
            case.engine.generate(odd, PLAIN, case.seed)
        except MeasurementError as error:
            require(
                str(name) in str(error),
                f"{what} in sequence {name} is refused without its name: {error.args[0]}",
                "name the sequence, so that the author of the prompt can find it",
            )
        else:
            raise Broken(
                f"sequence {name} has {what}, and was answered",
                "raise a MeasurementError that names the sequence",
            )
    # a kernel may begin from nothing; what cannot is refused like the others
    try:
        case.engine.generate(_with(batch, ()), PLAIN, case.seed)
    except MeasurementError as error:
        require(
            str(name) in str(error),
            f"an empty prompt in sequence {name} is refused without its name: {error.args[0]}",
            "name the sequence",
        )
    after = case.generate(batch)
    require(
        not case.deterministic or np.array_equal(before.token_N, after.token_N),
        "after a sequence was refused, the same seed drew other tokens",
        "refuse before anything is begun",
    )
    return "refused: " + (", ".join(what for what, _ in misfits) or "nothing that is known to fail")


def _with(batch: Batch, prompt: tuple[int, ...]) -> Batch:
    """The same batch, but for the prompt of its second sequence."""
    return replace(batch, prompts=(batch.prompts[0], prompt, *batch.prompts[2:]))


@LAWS.register("a_closed_engine_opens_again")
def a_closed_engine_opens_again(case: Case) -> None:
    """An engine may be closed twice, does not hang afterwards, and opens as the same kernel.

    The last of the laws: what it leaves behind is a closed engine.
    """
    if not case.reopen:
        raise Skipped("it is opened once only: reopen=False")
    first = case.description
    draws = hasattr(case.engine, "generate")
    batch, before = case.drawn(n=FEW) if draws else (case.batch(), None)
    case.engine.close()
    case.engine.close()
    for verb, ask in (
        ("describe", case.engine.describe),
        *([("generate", lambda: case.engine.generate(batch, PLAIN, case.seed))] if draws else []),
    ):
        require(
            _returns(ask),
            f"after close, {verb} did not answer within {_PATIENCE_S:g} s",
            "raise a MeasurementError where the engine is gone",
        )
    case.engine = case.open_engine()
    again = case.engine.describe()
    other = [name for name, value in asdict(first).items() if asdict(again)[name] != value]
    require(
        not other,
        f"opened a second time, the engine has another {', '.join(other)}",
        "whatever differs between two loads of one kernel has no place in the description",
    )
    if before is not None and case.deterministic:
        require(
            np.array_equal(case.generate(batch).token_N, before.token_N),
            "opened a second time, the same seed drew other tokens",
            'draw with uniforms(seed, "draw", sequence, width), or check with deterministic=False',
        )


def _returns(ask: Callable[[], object]) -> bool:
    """Whether a call comes back, with an answer or an error."""

    def quietly() -> None:
        with contextlib.suppress(Exception):
            ask()

    thread = threading.Thread(target=quietly, daemon=True)
    thread.start()
    thread.join(_PATIENCE_S)
    return not thread.is_alive()
