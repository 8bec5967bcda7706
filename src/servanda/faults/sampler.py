# Faults of the sampler: tokens are drawn otherwise than the record says.

from __future__ import annotations

from typing import Any

from servanda.errors import MeasurementError
from servanda.faults.base import fault
from servanda.sampling import Sampling
from servanda.trace import Batch, Trace


def _undisclosed(base: Any, change: dict[str, Any]) -> Any:
    class Undisclosed(base):
        def generate(self, batch: Batch, sampling: Sampling, seed: int) -> Trace:
            drawn = super().generate(batch, sampling.model_copy(update=change), seed)
            given = Batch(batch.sequence_S, batch.prompts, batch.width, drawn.continuations)
            # the record is that of the declared transform, on the very same path
            return super().score(given, sampling, "decode")

    return Undisclosed


def _number(name: str, value: Any, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not low < value <= high:
        raise MeasurementError(
            f"fault {name!r} takes a number in ({low:g}, {high:g}], found {value!r}",
            hint=f"write `fault: {{{name}: {high / 2:g}}}`",
        )
    return float(value)


@fault("undisclosed_top_p")
def undisclosed_top_p(base: Any, value: Any) -> Any:
    """Draws from the nucleus of mass `value`, reports the declared distribution."""
    return _undisclosed(base, {"top_p": _number("undisclosed_top_p", value, 0, 1)})


@fault("undisclosed_temperature")
def undisclosed_temperature(base: Any, value: Any) -> Any:
    """Draws at another temperature than it reports."""
    return _undisclosed(base, {"temperature": _number("undisclosed_temperature", value, 0, 2)})
