# Reading dumps beside the parse alone, for the rows of benchmarks/speed.py.

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks import dumps
from servanda.rl.dumps.formats import open_dump
from servanda.rl.dumps.formats.json_arrays import Flags, Floats
from servanda.rl.dumps.formats.parquet import Writer

Beside = Callable[..., list[Any]]
STEPS, SEQUENCES, PROMPT = 4, 256, 128
MEGABYTES = 20
NEMO = {
    **dict.fromkeys(("generation_logprobs", "prev_logprobs", "advantages"), list[Floats]),
    "token_ids": list[list[int]],
    "token_loss_mask": list[Flags],
}
PRIME = {
    **dict.fromkeys(("inference_logprobs", "trainer_logprobs", "advantages"), Floats),
    **dict.fromkeys(("entropy", "rl_weights"), Floats),
    "token_ids": list[int],
    "position_ids": list[int],
    "loss_mask": Flags,
}


def parquet(beside: Beside, rounds: int) -> list[Any]:
    """The own format, float32 and float64, beside pyarrow's reading of the same columns."""
    import pyarrow.parquet as pq

    rows = []
    for dtype in (np.float32, np.float64):
        with tempfile.TemporaryDirectory() as folder:
            tokens = own(Path(folder), dtype)
            files = sorted(Path(folder).glob("*.parquet"))

            def alone(files: list[Path] = files) -> None:
                for file in files:
                    pq.read_table(file, use_threads=False)

            rows += beside(
                f"own format in {np.dtype(dtype).name}, read and checked by row",
                "token",
                tokens,
                lambda folder=folder: whole(folder),
                {"pyarrow.parquet.read_table": alone},
                rounds,
            )
    return rows


def json_lines(beside: Beside, rounds: int) -> list[Any]:
    """Each format of JSON lines beside the parse of its lines, already in memory."""
    rows = []
    for name, write, types in (("NeMo-RL", dumps.write, NEMO), ("prime-rl", prime, PRIME)):
        with tempfile.TemporaryDirectory() as folder:
            write(Path(folder), MEGABYTES)
            lines = [
                line
                for path in sorted(Path(folder).rglob("*.jsonl"))
                for line in path.read_bytes().splitlines()
            ]
            tokens = sum(len(chunk.token_N) for chunk in open_dump(folder).read())
            rows += beside(
                f"{name}, read and checked by row",
                "token",
                tokens,
                lambda folder=folder: whole(folder),
                parsers(lines, types),
                rounds,
            )
    return rows


def parsers(lines: list[bytes], types: Mapping[str, Any]) -> dict[str, Callable[[], None]]:
    """The parse alone, each line freed before the next, by each library that is installed."""
    line = msgspec.defstruct("line", [(name, kind | None, None) for name, kind in types.items()])
    parse = {
        "msgspec, the lists that are read": msgspec.json.Decoder(line).decode,
        "msgspec, everything": msgspec.json.decode,
    }
    try:
        import orjson  # pyright: ignore[reportMissingImports]

        parse["orjson, everything"] = orjson.loads
    except ImportError:
        pass

    def each(decode: Callable[[bytes], object]) -> None:
        for text in lines:
            decode(text)

    return {name: lambda decode=decode: each(decode) for name, decode in parse.items()}


def whole(folder: str) -> int:
    return sum(len(chunk) for chunk in open_dump(folder).read())


def own(folder: Path, dtype: Any) -> int:
    """Steps of our own format, 740 tokens a sequence; returns the tokens."""
    rng, writer, tokens = np.random.default_rng(0), Writer(folder), 0
    for step in range(STEPS):
        length_S = rng.integers(200, 1024, SEQUENCES) + PROMPT
        train = [-rng.exponential(0.5, size) for size in length_S]
        infer = [np.minimum(t + rng.normal(0, 0.01, len(t)), -1e-6) for t in train]
        writer.step(
            step,
            [rng.integers(0, 150_000, size) for size in length_S],
            [np.arange(size) >= PROMPT for size in length_S],
            [t.astype(np.float32).astype(dtype) for t in train],
            [t.astype(np.float32).astype(dtype) for t in infer],
            groups=[at // 8 for at in range(SEQUENCES)],
            labels={"env": [("math", "code", "chat")[at % 3] for at in range(SEQUENCES)]},
        )
        tokens += int(length_S.sum())
    return tokens


def prime(folder: Path, megabytes: int) -> None:
    """Steps of 64 lines of prime-rl until the size is reached."""
    rng, written, step = np.random.default_rng(1), 0, 0
    while written < megabytes << 20:
        inside = folder / "token_exports" / f"step_{step}"
        inside.mkdir(parents=True)
        path = inside / "rank_0.jsonl"
        with open(path, "w") as stream:
            for _ in range(dumps.LINES_A_STEP):
                stream.write(json.dumps(_prime_row(rng)) + "\n")
        (inside / "STABLE").touch()
        written, step = written + path.stat().st_size, step + 1


def _prime_row(rng: np.random.Generator, tokens: int = dumps.REAL) -> dict[str, object]:
    drawn = np.arange(tokens) >= dumps.PROMPT
    infer = (-rng.exponential(0.8, tokens)).astype(np.float32)
    train = np.minimum(infer + rng.normal(0, 0.01, tokens), -1e-6).astype(np.float32)
    return {
        "schema_version": 1,
        "env_name": "math",
        "token_ids": rng.integers(0, 150_000, tokens).tolist(),
        "position_ids": list(range(tokens)),
        "loss_mask": drawn.tolist(),
        "advantages": [0.5] * tokens,
        "inference_logprobs": np.where(drawn, infer, np.float32(0)).tolist(),
        "trainer_logprobs": train.tolist(),
        "entropy": rng.exponential(0.5, tokens).astype(np.float32).tolist(),
        "mismatch_kl": rng.exponential(1e-4, tokens).astype(np.float32).tolist(),
        "importance_ratio": np.exp(train - infer).tolist(),
        "is_masked": [False] * tokens,
        "rl_weights": [None] * tokens,
    }
