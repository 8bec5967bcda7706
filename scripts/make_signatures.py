"""Measures every fault of the catalogue on the shipped model, for the power of a gate.

One healthy pair of kernels and each fault at its default: the same seeded prompts, the same
texts; writes src/servanda/engines/faults/signatures.parquet.  Ten minutes on one core.  With
--field, the faults that the field met at another value than the default, at that one;
signatures_field.parquet.

    python scripts/make_signatures.py [--field] [--prompts 160]
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from servanda.engines.arrow import to_parquet
from servanda.engines.faults import FAULTS, injected, signatures
from servanda.engines.faults.signatures import ABOUT, KEPT
from servanda.errors import IdentityError
from servanda.judgement.power import Signature
from servanda.runner import run
from servanda.runner.round_files import read_rounds
from servanda.runner.run_directory import RunDirectory
from servanda.traces.trace import Trace, TracePair

ROOT = Path(__file__).parents[1]
CONTRACT = """\
apiVersion: servanda.dev/v1alpha1
kind: KernelContract
metadata: {{name: signature}}
kernels:
  train: {{engine: transformers, model: {model}, attention: eager, batch_size: 16}}
  infer: {{engine: transformers, model: {model}, dtype: bfloat16, attention: sdpa}}
workload:
  prompts: {root}/data/prompts.jsonl
  round: 32
  sampling: {{temperature: 1.0, max_new_tokens: 24, seed: 20}}
golden: {{prompts: {root}/data/golden.jsonl}}
numerical:
  - {{id: drift, metric: logit_osc_nats, at_most: 1000, slices: all}}
statistical:
  - {{id: tv, metric: tv, aggregate: mean, at_most: 0.9, slices: all}}
promotion: {{offline: {{sequences: [{prompts}, {prompts}]}}}}
"""
LARGEST = 3  # values of each metric on the golden texts


def joined(pairs):
    return TracePair(Trace.join([p.infer for p in pairs]), Trace.join([p.train for p in pairs]))


def measured(contract, folder):
    """The rounds of a contract as one pair, and the largest exact values on golden texts."""
    plan = run.compile(contract)
    pairs = run.measure(plan, folder)
    rounds = list(read_rounds(plan, RunDirectory(Path(folder), 1)))
    golden = {
        name: tuple(np.sort(values[~np.isnan(values)])[-LARGEST:][::-1].tolist())
        for name, values in pairs.golden.exact.items()
    }
    return joined([r.pair for r in rounds]), golden


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
    table = pa.concat_tables(tables).replace_schema_metadata({ABOUT: json.dumps(about).encode()})
    return to_parquet(table, compression_level=19, use_dictionary=True)


def _table(fault: str, pair: TracePair) -> pa.Table:
    infer = pair.infer
    offsets = pa.array(np.concatenate([[0], np.cumsum(infer.length_S)]).astype(np.int32))
    columns = {
        "fault": pa.array([fault] * len(infer.sequence_S)),
        "lost": pa.array(infer.lost_S),
        "prompt_tokens": pa.array(infer.prompt_tokens_S.astype(np.int32)),
    }
    for (side, name), kept in KEPT.items():
        values = pa.array(getattr(pair, side).columns[name].astype(kept), from_pandas=False)
        columns[f"{side}.{name}"] = pa.ListArray.from_arrays(offsets, values)
    return pa.table(columns)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=160)
    parser.add_argument("--field", action="store_true", help="at the values of the field")
    options = parser.parse_args()
    found = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "signature.kernelcontract.yaml"
        path.write_text(
            CONTRACT.format(root=ROOT, model=ROOT / "models" / "tiny-lm", prompts=options.prompts)
        )
        healthy = run.load(path)
        for name, fault in FAULTS.items():
            value = fault.field if options.field else fault.default
            if options.field and value in (None, fault.default):
                continue
            began = time.monotonic()
            try:
                pair, golden = measured(injected(healthy, name, value), f"{folder}/{name}")
            except IdentityError:
                pair, golden = None, {}
            found.append(Signature(name, fault.summary, pair, golden, json.dumps(value)))
            print(f"{name}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    data = to_bytes(found)
    file = signatures.FIELD_FILE if options.field else signatures.FILE
    out = ROOT / "src" / "servanda" / "engines" / "faults" / file
    out.write_bytes(data)
    print(f"{out.relative_to(ROOT)}: {len(data) / 1e6:.2f} MB, {len(found)} faults")


if __name__ == "__main__":
    main()
