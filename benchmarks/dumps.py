"""How fast a trainer's dump is read, and in how much memory, beside reading its bytes alone.

    python -m benchmarks.dumps [--mb 200] [--keep FOLDER]

Writes a synthetic dump of NeMo-RL (float32 logprobs as Python prints them, 2,048 tokens a
sequence, a fifth of them padding), then reads it in a process of its own.  Seconds are
processor seconds, so that other work on the machine does not count.  `--mb 1000` is the
size of a day of a small run.  Peak memory is the reading process's own.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

TOKENS, REAL, PROMPT = 2048, 1640, 200
LINES_A_STEP = 64
_SPREAD = 0.01  # nats; the mean is such that weights average 1, as those of two kernels do


def write(folder: Path, megabytes: int) -> None:
    """Steps of 64 sequences until the size is reached."""
    rng = np.random.default_rng(1)
    written = step = 0
    while written < megabytes << 20:
        step += 1
        path = folder / f"train_data_step{step}.jsonl"
        with open(path, "w") as stream:
            for index in range(LINES_A_STEP):
                stream.write(json.dumps(_row(rng, index)) + "\n")
        written += path.stat().st_size


def _row(rng: np.random.Generator, index: int) -> dict[str, object]:
    at = np.arange(TOKENS)
    drawn = (at >= PROMPT) & (at < REAL)
    infer = (-rng.exponential(0.8, TOKENS)).astype(np.float32)
    train = np.minimum(infer + rng.normal(-(_SPREAD**2) / 2, _SPREAD, TOKENS), -1e-6).astype(
        np.float32
    )
    return {
        "content": ["x" * 4 * TOKENS],
        "rewards": [1.0],
        "input_lengths": [REAL],
        "token_ids": [np.where(at < REAL, rng.integers(0, 150_000, TOKENS), 0).tolist()],
        "token_loss_mask": [drawn.astype(float).tolist()],
        "sample_loss_mask": [1.0],
        "advantages": [[0.5] * TOKENS],
        "generation_logprobs": [np.where(drawn, infer, np.float32(0)).tolist()],
        "prev_logprobs": [np.where(at < REAL, train, np.float32(-0.0)).tolist()],
        "idx": index,
    }


def read(folder: str, sound: bool) -> None:
    """Read a dump and print processor seconds, tokens, bytes and peak memory as JSON."""
    from servanda.rl.dumps.checks import Soundness
    from servanda.rl.dumps.formats import open_dump

    dump, soundness = open_dump(folder), Soundness()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begun, tokens, trained = time.process_time(), 0, 0
    for chunk in dump.read():
        tokens += len(chunk.token_N)
        trained += int(chunk.mask_N.sum())
        if sound:
            soundness.add(chunk)
    spent = time.process_time() - begun
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({
        "seconds": spent, "tokens": tokens, "trained": trained, "bytes": dump.bytes,
        "peak_mb": peak / 1024, "before_mb": before / 1024,
    }))  # fmt: skip


def floor(folder: Path) -> float:
    """Processor seconds to read the bytes, a line at a time."""
    begun = time.process_time()
    for path in sorted(folder.glob("*.jsonl")):
        with open(path, "rb") as stream:
            for _ in stream:
                pass
    return time.process_time() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mb", type=int, default=200)
    parser.add_argument("--keep", type=Path, help="a folder that the dump stays in")
    parser.add_argument("--read", help=argparse.SUPPRESS)
    parser.add_argument("--sound", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.read:
        read(asked.read, asked.sound)
        return
    with tempfile.TemporaryDirectory() as made:
        folder = asked.keep or Path(made)
        folder.mkdir(parents=True, exist_ok=True)
        if not any(folder.glob("*.jsonl")):
            write(folder, asked.mb)
        least = floor(folder)
        for sound in (False, True):
            again = [sys.executable, "-m", "benchmarks.dumps", "--read", str(folder)]
            out = subprocess.run(
                again + (["--sound"] if sound else []), check=True, capture_output=True, text=True
            )
            told = json.loads(out.stdout)
            print(
                f"{'read and checked' if sound else 'read':<17}"
                f"{told['bytes'] / 2**20:,.0f} MB  {told['tokens'] / told['seconds'] / 1e6:.2f} M "
                f"tokens/s  {told['bytes'] / told['seconds'] / 2**20:,.0f} MB/s  "
                f"{told['seconds'] / least:.0f} x the bytes alone  "
                f"peak {told['peak_mb']:,.0f} MB ({told['before_mb']:,.0f} before)"
            )


if __name__ == "__main__":
    main()
