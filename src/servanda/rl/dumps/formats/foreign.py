# Files of trainers that hold no logprobs of both sides: named, with what would.

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from itertools import islice

from servanda.rl.dumps.formats import jsonl
from servanda.rl.dumps.formats.base import File
from servanda.rl.dumps.storage import Place

_FILES = 4096  # most files of a folder that are looked at
_OWN = (
    ": write it there with `Writer` (servanda.rl.dumps.formats.parquet), or call `Monitor.observe`"
)


@dataclass(frozen=True)
class Foreign:
    """A kind of file that a trainer writes.

    Args:
        file: pattern of "FOLDER/NAME"; keys: those of its first line, where names do not decide.
        holds: its columns, in words.
        hint: where the logprobs of both sides are.
    """

    framework: str
    file: str
    keys: str
    holds: str
    hint: str


FOREIGN = (
    Foreign(
        *("verl (trainer.rollout_data_dir)", "*/*.jsonl", "input output score step"),
        "text and scores",
        "verl's batch has them: set SERVANDA_VERL=verl-sync, and SERVANDA_VERL_DUMP=FOLDER for a "
        "dump (docs/how-to/verl.md)",
    ),
    Foreign(
        *("TRL (log_completions)", "*/completions_*.parquet", "", "text and rewards"),
        "class Trainer(Dumping, GRPOTrainer) of servanda.rl.trl writes them (docs/how-to/dumps.md)",
    ),
    Foreign(
        *("ms-swift (log_completions)", "*/completions.jsonl", "prompt completion advantages"),
        "text, rewards and advantages",
        "its GRPO trainer has them in each micro-batch, as old_per_token_logps, "
        f"rollout_per_token_logps and completion_mask{_OWN}",
    ),
    Foreign(
        "AReaL (rollout.dump_to_file)",
        *("*/*.jsonl", "task_id head_version tail_version completion"),
        "text, rewards and versions",
        "its actor's batch has them, as logprobs (of the engine, before the actor replaces them), "
        f"prox_logp, loss_mask and versions{_OWN}",
    ),
    Foreign(
        *("ROLL (rollout_dump_dir)", "*/rollout_dump_data.step_*.jsonl", "", "columns of text"),
        f"its batch has them, as infer_logprobs, old_log_probs and response_mask{_OWN}",
    ),
    Foreign(
        *("tinker-cookbook (capture)", "capture/*.jsonl", ""),
        "the calls of sampling and training",
        "join the logprobs of each sampling call with those that forward_backward returned for the "
        f"same tokens{_OWN}",
    ),
    Foreign(
        *("rLLM", "episodes/*.json", "", "episodes with the logprobs of the sampler at most"),
        "the trainer under it (verl, tinker) has both: see docs/how-to/verl.md",
    ),
    Foreign(
        *("miles (policy_loss_debug)", "policy_loss_debug/rank_*_call_*.pt", ""),
        "logprobs without token ids and without the number of the rollout",
        "--dump-details DIR writes DIR/train_data, which has them",
    ),
)


def recognised(path: Place) -> tuple[str, Foreign] | None:
    """The first file of a folder, or the file, that a known trainer wrote without both logprobs."""
    folder = path if path.is_dir() else path.parent
    for file in islice(_files(path), _FILES):
        name = f"{file.parent.name}/{file.name}"
        for kind in FOREIGN:
            if fnmatch(name, kind.file) and {*kind.keys.split()} <= _keys(file, name):
                return file.relative_to(folder).as_posix(), kind  # pyright: ignore[reportArgumentType] - of one kind
    return None


def _files(path: Place) -> Iterator[Place]:
    if not path.is_dir():
        yield path
        return
    for suffix in ("jsonl", "json", "parquet", "pt"):
        yield from path.rglob(f"*.{suffix}")


def _keys(file: Place, name: str) -> set[str]:
    return {*jsonl.head([File(file, 0, name)], [])} if file.suffix == ".jsonl" else set()
