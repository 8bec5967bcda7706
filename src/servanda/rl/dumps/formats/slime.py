# slime and miles: train_data/<rollout>.pt, written by --dump-details with torch.save.
#
# slime (format 2) keeps `samples`, one dict each; miles keeps one file per rank with columns in
# `rollout_data`, and tensor-parallel ranks write the same samples again.  Tokens are whole
# sequences; masks, logprobs and advantages cover the response, the last tokens of it.
#
# Routed experts, [T - 1, layers, experts], are those of the tokens that are fed: all but the last.
# A trainer that replays them deletes them before it writes train_data; they remain in
# rollout_data/<rollout>.pt, which the same option writes.

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from servanda.errors import MeasurementError
from servanda.rl.dumps.formats import base
from servanda.rl.dumps.formats.json_arrays import Unusable, require
from servanda.rl.dumps.formats.padding import plain
from servanda.rl.dumps.formats.rollout_data import FILE, ROUTES, Recorded, holds_routes
from servanda.rl.dumps.formats.route_rows import routes_of
from servanda.rl.dumps.formats.torch_file import loaded, mentions
from servanda.rl.dumps.storage import Place
from servanda.traces.rollouts import ROUTE, ROUTES_UNREAD, Array

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
        known: set[tuple[str, bytes]] = set()
        routed: tuple[int, ...] = ()  # layers and experts, of the first sequence that has any
        read = [(file, _samples(loaded(file.path, file.name), file)) for file in files]
        # of a step: miles counts updates since its process started, and rollout numbers continue
        newest = max((v for _, many in read for s in many for v in _versions(s)), default=0)
        bare = not any(sample.get(ROUTES) is not None for _, many in read for sample in many)
        recorded = Recorded(files[0].path, files[0].step) if bare and files else None
        for file, samples in read:
            for at, sample in enumerate(samples):
                place = f"{file.name}:{at + 1}"
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
                if len(files) > 1:  # tensor-parallel ranks have the same samples
                    data = row.token.tobytes() + row.logp_infer.tobytes()
                    key = (str(sample.get("sample_index")), hashlib.blake2b(data).digest())
                    if key in known:
                        continue
                    known.add(key)
                yield place, row


def _samples(payload: Mapping[str, Any], file: base.File) -> list[Mapping[str, Any]]:
    """One mapping per sequence, for both layouts."""
    samples, columns = payload.get("samples"), payload.get("rollout_data")
    raw = payload.get("raw_reward")
    if isinstance(samples, list) and all(isinstance(sample, dict) for sample in samples):
        known = raw if isinstance(raw, list) and len(raw) == len(samples) else [None] * len(samples)
        return [
            {**sample, "raw_reward": reward} for sample, reward in zip(samples, known, strict=True)
        ]
    if not isinstance(columns, dict) or not isinstance(columns.get("tokens"), list):
        raise MeasurementError(
            f"{file.name} has neither samples nor rollout_data",
            hint="write it by --dump-details",
        )
    count = len(columns["tokens"])
    shard = payload.get("cp_size", 1) not in (1, None)
    own = {str(k): v for k, v in columns.items() if isinstance(v, list) and len(v) == count}
    own["sample_index"] = own.get("sample_indices", [None] * count)
    return [
        {"shard": shard, **{key: column[at] for key, column in own.items()}} for at in range(count)
    ]


def _row(sample: Mapping[str, Any], newest: int) -> base.RolloutRow:
    if sample.get("shard"):
        raise Unusable("its columns are parts of a context-parallel rank, which are not joined")
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
    if versions:  # of a response that several weights sampled, the first and the last
        ends = dict.fromkeys((min(versions), max(versions)))
        labels["weight_version"] = "-".join(map(str, ends))
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


def _array(value: Any, name: str) -> Array:
    try:
        return plain(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise Unusable(f"{name} are not numbers") from None


def _column(value: Any, name: str, kinds: str) -> Array:
    array = _array(value, name)
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
