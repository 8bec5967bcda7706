# The texts of a comparison: a file, the shipped ones, or those of a pack; their lengths, and those
# of a few responses that it does not judge.

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from servanda.contract import presets
from servanda.contract.identity import digest_of
from servanda.contract.workload import WorkloadSampling
from servanda.errors import ContractError, MeasurementError
from servanda.runner import load
from servanda.runner.compare.sides import Sides
from servanda.runner.probe import Engines
from servanda.runner.round_files import in_order
from servanda.theory.sampling import uniforms
from servanda.traces.corpus import Corpus
from servanda.traces.trace import Batch

SHIPPED = "prompts.jsonl"


def shipped(name: str) -> Path:
    """A corpus in the package, or in the repository of a clone."""
    if path := presets.shipped(f"data/{name}"):
        return path
    raise MeasurementError(
        "the shipped prompts are not here",
        hint="install the wheel, or name your own with --prompts FILE",
    )


def prompts_of(file: Path | None, sides: Sides) -> tuple[Corpus, str]:
    """The prompts, and their description."""
    if sides.pack is not None:
        text = sides.pack.schedule.prompts
        own = Corpus.parse(text, f"{sides.pack.file}:prompts.jsonl")
        if file is not None and read_corpus(file).digest != own.digest:
            raise ContractError(
                f"{file} is not what the pack {sides.pack.file} was drawn on",
                hint="leave --prompts out: the pack has its prompts",
            )
        return own, f"the pack's {len(own):,} prompts"
    path = file or shipped(SHIPPED)
    corpus = read_corpus(path)
    whose = f"{path}" if file else "the shipped prompts (--prompts FILE for your own)"
    return corpus, f"{len(corpus):,} prompts: {whose}"


def plain_texts(file: Path | None) -> list[str]:
    """The prompts of a comparison that are texts, in the order of the file."""
    corpus = read_corpus(file or shipped(SHIPPED))
    return [prompt.text for prompt in corpus.prompts if prompt.token_ids is None]


def golden_of(file: Path | None, sides: Sides) -> Corpus | None:
    """The golden texts: those of the file, or those of a pack."""
    if sides.pack is None:
        return read_corpus(file) if file is not None else None
    text = sides.pack.schedule.golden
    own = None if text is None else Corpus.parse(text, f"{sides.pack.file}:golden.jsonl")
    if file is not None and (own is None or read_corpus(file).digest != own.digest):
        raise ContractError(
            f"{file} is not what the pack {sides.pack.file} was made with",
            hint="leave --golden out: a pack has its golden texts, or none",
        )
    return own


def read_corpus(path: Path) -> Corpus:
    """A corpus file that an option names.

    Raises:
        ContractError: it is missing, cannot be read, or has invalid lines.
    """
    if not path.exists():
        raise ContractError(
            f"there is no file {path}", hint='name a file of lines such as {"prompt": "..."}'
        )
    return load.read_corpus(path)


_LOOKS = 32  # responses that are sampled for their lengths
DREW = "Tokens of the answers that were drawn to choose depths:"


def answer_lengths(
    contract_file: Path,
    ids: Sequence[Sequence[int]],
    sampling: WorkloadSampling,
    sides: Sides,
    engines: Engines,
) -> tuple[int, ...]:
    """Lengths of a few responses of infer, to choose depth slices; not judged by the run.

    Those of a pack are its first ones, of which only the length is used.  A continued run keeps its
    depths, because a server may sample other responses the next time.
    """
    if contract_file.is_file():
        before = re.search(rf"(?m)^# {DREW} ([\d ]+)$", contract_file.read_text(encoding="utf-8"))
        if before:
            return tuple(map(int, before[1].split()))
    if sides.pack is not None:
        drawn = sides.pack.answers["generate"]
        lengths = drawn.length_S[~drawn.lost_S][:_LOOKS]
        return tuple(lengths.tolist()) or (sampling.max_new_tokens,)
    seed = int(digest_of(["depths", sampling.seed])[:15], 16)  # random numbers that no round uses
    rows = [int(u * len(ids)) for u in uniforms(seed, "prompt", 0, _LOOKS)]
    batch = Batch(
        tuple(range(_LOOKS)), tuple(tuple(ids[r]) for r in rows), sampling.max_new_tokens, ()
    )
    infer = engines.get(sides.infer, "infer")
    drawn = in_order(batch, infer.generate, sampling.transform, seed)
    lengths = drawn.length_S[~drawn.lost_S]
    return tuple(lengths.tolist()) or (sampling.max_new_tokens,)
