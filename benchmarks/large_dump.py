"""A dump that is larger than one machine: tokens per second of one process and of Ray.

    python -m benchmarks.large_dump [--tokens 100_000_000] [--on s3] [--rounds 3] [--workers 1 2 4]

Writes a synthetic dump of the own format (12 bytes a token; 2,048 sequences of 512 tokens a step),
once, and judges it by `servanda check`: with one process, and on a local Ray cluster
with 1, 2 and 4 workers, in turns.  `--on s3` puts the dump into a bucket of a local S3 server,
moto's, whose program is $SERVANDA_VENVS/moto/bin/moto_server.  Needs the extra `ray`.  The
verdicts must have the same evidence, or the benchmark fails.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from servanda.rl.dumps.formats.parquet import Writer

SEQUENCES, LENGTH, PROMPT = 2_048, 512, 64  # of a step
STEP = SEQUENCES * LENGTH  # tokens
_SPREAD = 0.02  # nats
_PORT = 5_555


def write(folder: Path, tokens: int) -> int:
    """Steps until there are so many tokens; a step that exists is kept.  Returns their number."""
    steps = max(1, round(tokens / STEP))
    for step in range(1, steps + 1):
        if not (folder / f"step_{step:06}.rank0.parquet").exists():
            _write(folder, step)
    return steps


def _write(folder: Path, step: int) -> None:
    rng = np.random.default_rng(step)
    infer_ST = -rng.exponential(0.8, (SEQUENCES, LENGTH)).astype(np.float32)
    noise_ST = rng.normal(-(_SPREAD**2) / 2, _SPREAD, infer_ST.shape).astype(np.float32)
    train_ST = np.minimum(infer_ST + noise_ST, np.float32(-1e-6))
    infer_ST[:, :PROMPT] = train_ST[:, :PROMPT] = np.nan
    mask_ST = np.broadcast_to(np.arange(LENGTH) >= PROMPT, infer_ST.shape)
    token_ST = rng.integers(0, 150_000, infer_ST.shape)
    groups = [f"{step}.{s // 8}" for s in range(SEQUENCES)]
    labels = {"env": [("code", "math")[s // 8 % 2] for s in range(SEQUENCES)]}
    Writer(folder).step(step, token_ST, mask_ST, train_ST, infer_ST, groups=groups, labels=labels)


def judged(place: str, *options: str) -> tuple[float, str, str]:
    """Seconds of a verdict after the start of Ray, its evidence, and the line about the cluster."""
    command = [sys.executable, "-m", "servanda", "check", place, "--format", "json"]
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "verdict.json"
        ended = subprocess.run(
            [*command, "-o", str(output), *options], stderr=subprocess.PIPE, text=True
        )
        if ended.returncode not in (0, 1, 3):
            raise SystemExit(f"{' '.join(command)} failed: {ended.stderr}")
        verdict = json.loads(output.read_bytes())
    cost = [line for line in ended.stderr.splitlines() if line.startswith("computed by")]
    return verdict["circumstances"]["seconds"], verdict["evidence"], "".join(cost)


@contextlib.contextmanager
def bucket(folder: Path) -> Iterator[str]:
    """The URL of a folder's copy in a bucket of a local S3 server."""
    from pyarrow.fs import FileSystem, copy_files

    program = Path(os.environ.get("SERVANDA_VENVS", ".venvs")) / "moto" / "bin" / "moto_server"
    os.environ |= {"AWS_ACCESS_KEY_ID": "made", "AWS_SECRET_ACCESS_KEY": "up"}
    os.environ["AWS_EC2_METADATA_DISABLED"] = "true"
    with open(os.devnull, "wb") as nowhere:
        server = subprocess.Popen([program, "-p", str(_PORT)], stdout=nowhere, stderr=nowhere)
    try:
        request = urllib.request.Request(f"http://127.0.0.1:{_PORT}/dumps", b"", method="PUT")
        for _ in range(300):
            with contextlib.suppress(OSError):
                urllib.request.urlopen(request).close()
                break
            time.sleep(0.1)
        url = f"s3://dumps/run?endpoint_override=127.0.0.1:{_PORT}&scheme=http&region=us-east-1"
        store, key = FileSystem.from_uri(url)
        copy_files(str(folder), key, destination_filesystem=store)
        yield url
    finally:
        server.terminate()
        server.wait(20)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=100_000_000)
    parser.add_argument("--folder", type=Path, default=Path("runs/large-dump"))
    parser.add_argument("--on", choices=["path", "s3"], default="path")
    parser.add_argument("--workers", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    began = time.monotonic()
    tokens = write(args.folder, args.tokens) * STEP
    size = sum(path.stat().st_size for path in args.folder.iterdir())
    print(f"{tokens:,} tokens, {size / 1e9:.2f} GB, written in {time.monotonic() - began:.0f} s")
    place = bucket(args.folder) if args.on == "s3" else contextlib.nullcontext(str(args.folder))
    ways: dict[str, list[str]] = {"one process": ["--jobs", "1"]}
    ways |= {f"Ray, {n} workers": ["--on", "local", "--jobs", str(n)] for n in args.workers}
    found: dict[str, list[float]] = {way: [] for way in ways}
    evidence: set[str] = set()
    with place as where:
        for _ in range(args.rounds):
            for way, options in ways.items():
                seconds, digest, cost = judged(where, *options)
                found[way].append(tokens / seconds)
                evidence.add(digest)
                print(f"{way}: {tokens / seconds / 1e6:.2f} M tokens/s {cost}", flush=True)
    if len(evidence) != 1:
        raise SystemExit(f"the evidence differs: {sorted(evidence)}")
    result: dict[str, Any] = {way: statistics.median(rates) for way, rates in found.items()}
    alone = result["one process"]
    for way, rate in result.items():
        print(f"{way:<16} {rate / 1e6:6.2f} M tokens/s  {rate / alone:5.2f} x")


if __name__ == "__main__":
    main()
