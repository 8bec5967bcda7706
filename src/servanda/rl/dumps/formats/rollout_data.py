# slime and miles: rollout_data/<rollout>.pt, what the sampler recorded, one dict a sample.
#
# A trainer that replays routed experts deletes them before it writes train_data/.  A sample of
# train_data/ is found here by its place among the samples, or by its number, and is taken for the
# same only if its tokens are equal.

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from servanda.errors import MeasurementError
from servanda.rl.dumps.formats import base, torch_file
from servanda.rl.dumps.formats.json_arrays import Unusable
from servanda.rl.dumps.formats.padding import plain
from servanda.rl.dumps.formats.route_rows import routes_of
from servanda.rl.dumps.storage import Place
from servanda.traces.rollouts import ROUTE, Array

ROUTES = "rollout_routed_experts"
FILE = re.compile(r"rollout_data/(?P<step>\d+)\.pt")
# the key as torch.save writes it first, with the number it is stored under, and a None
_NONE = re.compile(ROUTES.encode() + rb"(?:q.|r.{4})N", re.DOTALL)
_INDEX = 1 << 24  # bytes of an index in which the first sample's key is looked for


class Recorded:
    """The samples of one step as the sampler recorded them, if they hold routed experts.

    Args:
        train: a file of the step in train_data/.

    Attributes:
        unread: why the file cannot be read; "" if it can, or if there is none.
    """

    def __init__(self, train: Place, step: int) -> None:
        path = train.parent.parent / "rollout_data" / f"{step}.pt"
        self.unread = ""
        self._at: list[Mapping[str, Any]] = []
        self._number: dict[Any, Mapping[str, Any]] = {}
        if not (path.is_file() and holds_routes(path)):
            return
        try:
            self._at = samples_of(path, f"rollout_data/{step}.pt")
        except MeasurementError as error:
            self.unread = error.problems[0].message
            return
        numbers = [sample.get("index") for sample in self._at]
        if None not in numbers and len({*map(str, numbers)}) == len(numbers):
            self._number = {str(n): sample for n, sample in zip(numbers, self._at, strict=True)}

    def routes(self, sample: Mapping[str, Any]) -> Any:
        """The recorded experts of a sample of train_data/; None where there are none."""
        at, number = sample.get("rollout_position"), sample.get("sample_index")
        found: list[Mapping[str, Any]] = []
        if isinstance(at, int) and 0 <= at < len(self._at):
            found.append(self._at[at])
        if (of_number := self._number.get(str(number))) is not None:
            found.append(of_number)
        for other in found:
            if np.array_equal(_ids(sample.get("tokens")), _ids(other.get("tokens"))):
                return other.get(ROUTES)
        return None


def holds_routes(path: Place) -> bool:
    """Whether the first sample of a file has routed experts, without loading the file."""
    index = torch_file.index_of(path, _INDEX)
    return ROUTES.encode() in index and _NONE.search(index) is None


def samples_of(path: Place, name: str) -> list[Mapping[str, Any]]:
    """The samples of a file.

    Raises:
        MeasurementError: it cannot be read, or holds none.
    """
    samples = torch_file.loaded(path, name, arrays=True).get("samples")
    if not isinstance(samples, list) or not all(isinstance(one, dict) for one in samples):
        raise MeasurementError(f"{name} has no samples", hint="write it by --dump-details")
    return samples


def alone(
    files: tuple[base.File, ...], refused: base.Refused
) -> Iterator[tuple[int, str, base.RolloutRow]]:
    """(step, place, row) of the samples that hold routed experts, without a trainer's side."""
    for file in files:
        for at, sample in enumerate(samples_of(file.path, file.name)):
            place = f"{file.name}:{at + 1}"
            if sample.get(ROUTES) is None:
                refused.add(f"{ROUTES} is missing", place)
                continue
            try:
                token = _ids(sample.get("tokens"))
                route_TLK = routes_of(sample[ROUTES], len(token), ROUTES)
            except Unusable as unusable:
                refused.add(str(unusable), place)
                continue
            nothing = np.full(len(token), np.nan)
            response = sample.get("response_length")
            prompt = len(token) - response if isinstance(response, int) else 0
            mask = np.arange(len(token)) >= prompt
            columns = {ROUTE: route_TLK}
            yield (
                file.step,
                place,
                base.RolloutRow(token, mask, nothing, nothing, prompt, per_token=columns),
            )


def _ids(value: Any) -> Array:
    try:
        token = plain(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise Unusable("tokens are not numbers") from None
    if token.ndim != 1 or token.dtype.kind not in "iu":
        raise Unusable("tokens are not a list of whole numbers")
    return token.astype(np.int64)
