# The signatures of the faults: what each did to the shipped model, measured once and kept.
#
# One row a sequence; its tokens are lists.  Written by scripts/make_signatures.py, one file of
# the faults at their defaults, one of those that the field met at another value, at that one.

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib.resources import files

import numpy as np
import pyarrow as pa

from servanda.engines.arrow import from_parquet
from servanda.engines.faults.base import FAULTS
from servanda.judgement.power import Signature
from servanda.traces.trace import Trace, TracePair

FILE = "signatures.parquet"
FIELD_FILE = "signatures_field.parquet"
# side and column of the pair -> how finely it is kept; log ratios of 1e-7 are noise here
KEPT: Mapping[tuple[str, str], type] = {
    ("infer", "logp"): np.float32,
    ("train", "logp"): np.float32,
    ("infer", "mass_before"): np.float32,
    ("infer", "entropy_nats"): np.float16,
    ("infer", "p_max"): np.float16,
    ("infer", "rank"): np.float16,
    ("infer", "top1"): np.float16,
    ("train", "top1"): np.float16,
}
ABOUT = b"servanda"


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
    about = json.loads(table.schema.metadata[ABOUT])
    fault_S = np.array(table["fault"].to_pylist())
    found = []
    for entry in about:
        at = np.flatnonzero(fault_S == entry["fault"])
        golden = {name: tuple(values) for name, values in entry.pop("golden").items()}
        pair = _pair(table.take(pa.array(at))) if len(at) else None
        found.append(Signature(**entry, pair=pair, golden=golden))
    return tuple(found)


def _pair(table: pa.Table) -> TracePair:
    lists = {name: table[f"{name[0]}.{name[1]}"].to_pylist() for name in KEPT}
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
