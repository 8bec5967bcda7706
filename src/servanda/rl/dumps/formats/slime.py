# slime and miles: train_data/<rollout>.pt, written by --dump-details with torch.save.
#
# slime (format 2) keeps `samples`, one dict each; miles one file of columns per rank (miles.py).
# Tokens are whole sequences; masks, logprobs and advantages cover the response, the last tokens.
#
# slime's trainer computes log_probs before the first update of a rollout, or takes them from the
# forward passes of the updates themselves (--use-rollout-logprobs), and does not say which: where a
# rollout is trained in several updates, that of each sequence is read from `dp_shards`.
#
# Routed experts, [T - 1, layers, experts], are those of the tokens that are fed: all but the last.
# A trainer that replays them deletes them before it writes train_data; they remain in
# rollout_data/<rollout>.pt, which the same option writes: what the sampler recorded, one dict a
# sample.  A sample of train_data/ is found there by its place among the samples, or by its number,
# and is taken for the same only if its tokens are equal.
#
# Files of torch.save are read as tensors and plain data: nothing in them is run.

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np

from servanda.errors import MeasurementError
from servanda.rl.dumps.formats import base, miles
from servanda.rl.dumps.formats.json_arrays import Unusable, require
from servanda.rl.dumps.formats.route_rows import routes_of
from servanda.rl.dumps.storage import Place, local, seekable
from servanda.traces.rollouts import ROUTE, ROUTES_UNREAD, UPDATE, VERSIONS, Array

_HEAD = 1 << 16  # bytes of a file's index that are read at once


def loaded(path: Place, name: str, *, arrays: bool = False) -> Mapping[str, Any]:
    """A file that holds a dict.

    Args:
        name: of the file, for messages.
        arrays: whether it may hold NumPy's arrays of numbers, too.

    Raises:
        MeasurementError: it does not, or torch is not installed.
    """
    try:
        import torch
    except ImportError:
        raise MeasurementError(
            f"{name} was written by torch, which is not installed here",
            hint="pip install torch --index-url https://download.pytorch.org/whl/cpu",
        ) from None
    admitted = torch.serialization.safe_globals(_of_arrays()) if arrays else nullcontext()
    try:
        with local(path) as file, admitted:
            payload = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # a broken or hostile file raises many types of errors
        reason, *_ = str(error).strip().splitlines() or [type(error).__name__]
        raise MeasurementError(
            f"{name} cannot be read as tensors and plain data: {reason}",
            hint="it is cut off, or holds objects that only the trainer can read",
        ) from None
    if not isinstance(payload, dict):
        raise MeasurementError(f"{name} holds no dict", hint="write it by --dump-details")
    return payload


def _of_arrays() -> list[Any]:
    """The names that a pickled array of numbers asks for, under both homes of NumPy's core."""
    rebuild = np.zeros(0).__reduce__()[0]
    kinds = [type(np.dtype(name)) for name in ("u1", "i2", "u2", "i4", "i8", "f4", "f8")]
    homes = [(rebuild, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")]
    return [np.ndarray, np.dtype, *kinds, *homes]


def mentions(path: Place, word: bytes) -> bool:
    """Whether the beginning of a file's index has a word."""
    return word in index_of(path, _HEAD)


def index_of(path: Place, size: int) -> bytes:
    """The beginning of a file's pickle, without the tensors; nothing of a file that has none."""
    try:
        with seekable(path) as source, zipfile.ZipFile(source) as archive:
            index = next(n for n in archive.namelist() if n.endswith("/data.pkl"))
            with archive.open(index) as stream:
                return stream.read(size)
    except (OSError, zipfile.BadZipFile, StopIteration, RuntimeError):
        return b""


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
    index = index_of(path, _INDEX)
    return ROUTES.encode() in index and _NONE.search(index) is None


def samples_of(path: Place, name: str) -> list[Mapping[str, Any]]:
    """The samples of a file.

    Raises:
        MeasurementError: it cannot be read, or holds none.
    """
    samples = loaded(path, name, arrays=True).get("samples")
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
    token = miles.numbers_of(value, "tokens")
    if token.ndim != 1 or token.dtype.kind not in "iu":
        raise Unusable("tokens are not a list of whole numbers")
    return token.astype(np.int64)


_FILE = re.compile(r"train_data/(?P<step>\d+)(?:_(?P<rank>\d+))?\.pt")
_NEEDED = ("tokens", "loss_masks", "log_probs", "rollout_log_probs")


@base.importer("slime")
class SlimeImporter:
    framework = "slime or miles"
    looks_for = "train_data/<N>.pt"
    pickled = False  # torch.load accepts only tensors and plain data

    def sniff(self, folder: Place) -> base.Detection | None:
        files = base.files_in(folder, "*.pt", _FILE)
        if not files:
            sampled = base.files_in(folder, "*.pt", FILE)
            routed = any(holds_routes(file.path) for file in sampled[:1])
            why = "names, and recorded experts of the sampler"
            return (
                base.Detection("slime", folder, sampled, True, why, alone=True) if routed else None
            )
        sure = any(
            mentions(file.path, b"rollout_id") for file in dict.fromkeys((files[0], files[-1]))
        )
        why = "names and the head of a file" if sure else f"{files[0].name} holds no rollout_id"
        return base.Detection("slime", folder, files, sure, why)

    def rows(self, files: Sequence[base.File], refused: base.Refused) -> Iterator[base.Placed]:
        routed: tuple[int, ...] = ()  # layers and experts, of the first sequence that has any
        read = [(file, _samples(loaded(file.path, file.name), file)) for file in files]
        # of a step: miles counts updates since its process started, and rollout numbers continue
        newest = max((v for _, many in read for s in many for v in _versions(s)), default=0)
        bare = not any(sample.get(ROUTES) is not None for _, many in read for sample in many)
        recorded = Recorded(files[0].path, files[0].step) if bare and files else None
        for place, sample in _placed(read, refused):
            try:
                if recorded is not None:
                    unread = {"unread": True} if recorded.unread else {}
                    sample = {**sample, **(unread or {ROUTES: recorded.routes(sample)})}
                row = _row(sample, newest)
            except Unusable as unusable:
                refused.add(str(unusable), place)
                continue
            if (route_TLK := row.per_token.get(ROUTE)) is not None:
                routed = routed or route_TLK.shape[1:]
                if route_TLK.shape[1:] != routed:
                    refused.add(f"{ROUTES} are of another model than those before", place)
                    continue
            yield place, row


def _placed(
    read: Sequence[tuple[base.File, miles.Samples]], refused: base.Refused
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The samples of a step's files with their places, in the order of the files."""
    ranks: list[tuple[base.File, miles.Samples]] = []  # files of miles
    for file, samples in read:
        if samples and "cp_size" in samples[0]:
            ranks.append((file, samples))
            continue
        for at, sample in enumerate(samples):
            yield f"{file.name}:{at + 1}", sample
    yield from miles.joined(ranks, refused)


def _samples(payload: Mapping[str, Any], file: base.File) -> miles.Samples:
    """One mapping per sequence, for both layouts."""
    samples = payload.get("samples")
    if not (isinstance(samples, list) and all(isinstance(sample, dict) for sample in samples)):
        return miles.samples_of(payload, file)
    raw, update = payload.get("raw_reward"), _updates(payload.get("dp_shards"))
    rewards = raw if isinstance(raw, list) and len(raw) == len(samples) else [None] * len(samples)
    return [
        {**sample, "raw_reward": reward, UPDATE: update.get(str(sample.get("rollout_position")))}
        for sample, reward in zip(samples, rewards, strict=True)
    ]


def _updates(shards: Any) -> dict[str, int]:
    """Position in the rollout -> which of its updates trained it, from 1; {} if there is one.

    Args:
        shards: `dp_shards`: of each data-parallel rank its samples, its micro-batches of them,
            and how many micro-batches each update has.
    """
    found: dict[str, int] = {}
    for shard in shards if isinstance(shards, list) else ():
        try:
            sizes = [int(n) for n in shard["num_microbatches"]]
            of_batch = np.repeat(np.arange(1, len(sizes) + 1), sizes)
            place = [int(at) for at in shard["partition"]]
            for update, batch in zip(of_batch, shard["micro_batch_indices"], strict=True):
                found |= {str(place[i]): int(update) for i in batch}
        except (KeyError, IndexError, TypeError, ValueError):
            return {}  # of another version of slime
    return found if len({*found.values()}) > 1 else {}


def _row(sample: Mapping[str, Any], newest: int) -> base.RolloutRow:
    require(sample, _NEEDED)
    token = _column(sample["tokens"], "tokens", "iu").astype(np.int64)
    loss = _column(sample["loss_masks"], "loss_masks", "iufb").astype(np.float64)
    response = len(loss)
    if sample.get("response_lengths", response) != response or response > len(token):
        raise Unusable("loss_masks and the response are not equally long")
    if not np.isin(loss, (0.0, 1.0)).all():
        raise Unusable("loss_masks is neither 0 nor 1 everywhere")
    prompt = len(token) - response
    mask = np.concatenate([np.zeros(prompt, dtype=bool), loss == 1.0])

    def whole(name: str) -> Array:
        column = _column(sample[name], name, "fiu").astype(np.float64)
        if len(column) != response:
            raise Unusable(f"{name} and loss_masks are not equally long")
        return np.concatenate([np.full(prompt, np.nan), column])

    optional = {"advantage": "advantages", "entropy_nats": "entropy"}
    per_token = {n: whole(key) for n, key in optional.items() if sample.get(key) is not None}
    if sample.get(ROUTES) is not None:
        per_token[ROUTE] = routes_of(sample[ROUTES], len(token), ROUTES)
    if versions := _versions(sample):
        per_token["staleness"] = np.full(len(token), float(newest - min(versions)))
    reward = sample.get("raw_reward")
    plain_reward = isinstance(reward, int | float) and not isinstance(reward, bool)
    numbers = {"reward": float(reward)} if plain_reward else {}  # pyright: ignore
    numbers |= {ROUTES_UNREAD: 1.0} if sample.get("unread") else {}
    source = sample.get("source_names")
    labels = {"env": source} if isinstance(source, str) and source else {}
    if (update := sample.get(UPDATE)) is not None:
        numbers[UPDATE] = float(update)
    if versions:  # of a response that several weights sampled, the first and the last
        ends = dict.fromkeys((min(versions), max(versions)))
        labels["weight_version"] = "-".join(map(str, ends))
        numbers[VERSIONS] = float(len({*versions}))
    return base.RolloutRow(
        token=token,
        mask=mask,
        logp_train=whole("log_probs"),
        logp_infer=base.drawn_only(whole("rollout_log_probs"), mask),
        prompt=prompt,
        labels=labels,
        per_sequence=numbers,
        per_token=per_token,
    )


def _column(value: Any, name: str, kinds: str) -> Array:
    array = miles.numbers_of(value, name)
    if array.ndim != 1 or (len(array) and array.dtype.kind not in kinds):
        raise Unusable(f"{name} are not a list of numbers")
    return array


def _versions(sample: Mapping[str, Any]) -> list[int]:
    """The weight versions that sampled a sequence, in miles's count; [] if unknown."""
    versions = sample.get("weight_versions")
    if not isinstance(versions, list):
        return []
    numbers = [int(v) for v in versions if str(v).isdecimal() and len(str(v)) < 10]
    return numbers if len(numbers) == len(versions) else []
