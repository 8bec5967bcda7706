# The signatures of the faults: what each did to the shipped model, measured once and kept.
#
# One row a sequence; its tokens are lists.  Written by scripts/make_signatures.py: one file of
# the faults at their defaults, one of those that the field met at another value, at that one.

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib.resources import files

import numpy as np
import pyarrow as pa

from servanda.engines.arrow import from_parquet, to_parquet
from servanda.engines.faults.base import FAULTS
from servanda.judgement.power import Signature
from servanda.traces.trace import Trace, TracePair

FILE = "signatures.parquet"
FIELD_FILE = "signatures_field.parquet"
# side and column of the pair -> how finely it is kept; log ratios of 1e-7 are noise here
_KEPT: Mapping[tuple[str, str], type] = {
    ("infer", "logp"): np.float32,
    ("train", "logp"): np.float32,
    ("infer", "mass_before"): np.float32,
    ("infer", "entropy_nats"): np.float16,
    ("infer", "p_max"): np.float16,
    ("infer", "rank"): np.float16,
    ("infer", "top1"): np.float16,
    ("train", "top1"): np.float16,
}
_ABOUT = b"servanda"


def to_bytes(signatures: Sequence[Signature]) -> bytes:
    """The file's content."""
    tables = [_table(s.fault, s.pair) for s in signatures if s.pair is not None]
    about = [
        {
            "fault": s.fault,
            "summary": s.summary,
            "golden": {name: list(values) for name, values in s.golden.items()},
            "strength": s.strength,
        }
        for s in signatures
    ]
    table = pa.concat_tables(tables).replace_schema_metadata({_ABOUT: json.dumps(about).encode()})
    return to_parquet(table, compression_level=19, use_dictionary=True)


def _table(fault: str, pair: TracePair) -> pa.Table:
    infer = pair.infer
    offsets = pa.array(np.concatenate([[0], np.cumsum(infer.length_S)]).astype(np.int32))
    columns = {
        "fault": pa.array([fault] * len(infer.sequence_S)),
        "lost": pa.array(infer.lost_S),
        "prompt_tokens": pa.array(infer.prompt_tokens_S.astype(np.int32)),
    }
    for (side, name), kept in _KEPT.items():
        values = pa.array(getattr(pair, side).columns[name].astype(kept), from_pandas=False)
        columns[f"{side}.{name}"] = pa.ListArray.from_arrays(offsets, values)
    return pa.table(columns)


@cache
def catalogue() -> tuple[Signature, ...]:
    """The signatures that travel with the package: at the defaults, then at the field's values."""
    own, met = (
        from_bytes((files("servanda.engines.faults") / name).read_bytes())
        for name in (FILE, FIELD_FILE)
    )
    # the first file is of the defaults, whether it says so or not
    own = tuple(
        s
        if s.strength or s.fault not in FAULTS
        else replace(s, strength=json.dumps(FAULTS[s.fault].default))
        for s in own
    )
    return own + tuple(replace(s, met=True) for s in met)


def from_bytes(data: bytes) -> tuple[Signature, ...]:
    """The signatures of a file's content."""
    table = from_parquet(data)
    about = json.loads(table.schema.metadata[_ABOUT])
    fault_S = np.array(table["fault"].to_pylist())
    found = []
    for entry in about:
        at = np.flatnonzero(fault_S == entry["fault"])
        golden = {name: tuple(values) for name, values in entry.pop("golden").items()}
        pair = _pair(table.take(pa.array(at))) if len(at) else None
        found.append(Signature(**entry, pair=pair, golden=golden))
    return tuple(found)


def _pair(table: pa.Table) -> TracePair:
    lists = {name: table[f"{name[0]}.{name[1]}"].to_pylist() for name in _KEPT}
    length_S = np.array([len(tokens) for tokens in lists["infer", "logp"]], dtype=np.int64)

    def side(which: str) -> Trace:
        return Trace(
            sequence_S=np.arange(len(length_S)),
            length_S=length_S,
            lost_S=np.array(table["lost"].to_pylist(), dtype=bool),
            prompt_tokens_S=np.array(table["prompt_tokens"].to_pylist(), dtype=np.int64),
            token_N=np.zeros(int(length_S.sum()), dtype=np.int64),
            columns={
                name: np.array([v for tokens in values for v in tokens], dtype=np.float64)
                for (of, name), values in lists.items()
                if of == which
            },
        )

    return TracePair(infer=side("infer"), train=side("train"))
