# A third scorer of a dump: which side is further from it, on rows that are chosen at random.

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from servanda.contract.kernel_string import parse_kernel, shown
from servanda.contract.model import Path
from servanda.engines import engine_names
from servanda.engines.worker import spawn
from servanda.errors import ContractError, MeasurementError
from servanda.judgement.slices.atoms import atoms_of
from servanda.judgement.slices.rules import Cut
from servanda.rl.dumps.formats.base import MEDIA
from servanda.rl.dumps.judge import DumpVerdict, selected_dump
from servanda.rl.dumps.statistics import PairFields
from servanda.rl.steps.blocks import blocks, paired
from servanda.runner.compare.side_distance import ThirdScore, side_distances
from servanda.runner.compare.sides import refuse_missing
from servanda.runner.measurement import Progress, Watch, unwatched
from servanda.runner.round_files import in_order
from servanda.theory.sampling import Sampling
from servanda.traces.corpus import NOT_READ
from servanda.traces.rollouts import Array, Rollouts
from servanda.traces.trace import Batch, some

_CHUNK = 16  # rows that are scored at a time


@dataclass(frozen=True)
class Referee:
    """A kernel string with the weights of the dump's step, and how it is asked."""

    text: str
    rows: int = 64
    temperature: float = 1.0


@dataclass(frozen=True)
class RowSample:
    """One row that was chosen.

    Args:
        token_T: its tokens; trained_T: the trained ones among them.
        train_K, infer_K: their logprobs on both sides.
        inside_CK: the slices that each is in.
    """

    token_T: Array
    trained_T: Array
    train_K: Array
    infer_K: Array
    inside_CK: Array


def refuse_referee(text: str, steps: Sequence[int], notes: Sequence[str] = ()) -> None:
    """Refuse a kernel that cannot be the referee of a dump.

    Args:
        notes: of its files.

    Raises:
        ContractError: an invalid string; a dump of several steps, whose weights differ; one with
            images, which a kernel does not see.
    """
    seen = next((note for note in notes if note.endswith(MEDIA)), None)
    if seen is not None:
        raise ContractError(
            f"the rows of the dump have more than tokens ({seen.removesuffix(MEDIA)[:-2]}), and a "
            f"reference scorer reads tokens alone: {NOT_READ}",
            hint="leave out --referee, or give it the dump of the rows without images",
        )
    refuse_missing(parse_kernel(text, engines=engine_names(), name="--referee"), text, "--referee")
    if len(steps) > 1:
        raise ContractError(
            f"the dump has {len(steps)} steps, and a reference scorer has the weights of one",
            hint=f"choose the step of its weights: servanda check DIR --steps "
            f"{steps[-1]} --referee {text}",
        )


def third_score(
    answer: DumpVerdict, referee: Referee, *, seed: int = 0, watch: Watch = unwatched
) -> ThirdScore:
    """Score rows of a dump of one step by a kernel with the weights of that step.

    The rows are drawn without regard to their numbers, all rows with the same probability.

    Raises:
        ContractError, MeasurementError: as the kernel does; none of its scores came back.
    """
    kernel = parse_kernel(referee.text, engines=engine_names(), name="--referee")
    cuts = [cut for cut in answer.statistics.cuts if cut.terms]
    sample, total = chosen(selected_dump(answer.options).read(), cuts, referee.rows, seed)
    sampling = Sampling.model_validate({"temperature": referee.temperature})
    engine = spawn(kernel, "referee")
    try:
        path: Path = kernel.path or "prefill"
        scored: list[Array] = []
        for start in range(0, len(sample), _CHUNK):
            watch(Progress("scoring by the third kernel", start, len(sample)))
            part = sample[start : start + _CHUNK]
            batch = _batch(part)
            trace = some(in_order(batch, engine.score, sampling, path), list(batch.sequence_S))
            ends = trace.length_S.cumsum()
            scores = np.split(trace.columns["logp"], ends[:-1])
            scored += [_of_row(row, logp) for row, logp in zip(part, scores, strict=True)]
        watch(Progress("scoring by the third kernel", len(sample), len(sample)))
    finally:
        engine.close()
    referee_N = np.concatenate(scored)
    if np.isnan(referee_N).all():
        raise MeasurementError(
            f"the reference scorer {shown(kernel)} scored none of {len(sample)} rows",
            hint="name another kernel, or ,path=decode if it only decodes",
        )
    inside_CN = np.concatenate([row.inside_CK for row in sample], axis=1)
    slices = {"all": np.ones(len(referee_N), dtype=bool)}
    slices |= {cut.name: inside_CN[i] for i, cut in enumerate(cuts) if inside_CN[i].any()}
    confidence = answer.statistics.measures.plan.contract.confidence
    train_N, infer_N = (
        np.concatenate([getattr(row, side) for row in sample]) for side in ("train_K", "infer_K")
    )
    distances = side_distances(train_N, infer_N, referee_N, slices, 1 - confidence)
    return ThirdScore(shown(kernel), len(sample), total, confidence, distances)


def chosen(
    read: Iterable[Rollouts], cuts: Sequence[Cut], rows: int, seed: int
) -> tuple[list[RowSample], int]:
    """That many rows with trained tokens, all equally likely, in random order; and how many are."""
    rng = np.random.default_rng(seed)
    kept: list[tuple[float, int, RowSample]] = []
    total = 0
    for block in blocks(read):
        draw_S = rng.random(len(block))
        inside_CK = atoms_inside(block, cuts)
        ends = block.trained_S.cumsum()
        for s in np.flatnonzero(block.trained_S).tolist():
            total += 1
            if len(kept) == rows and draw_S[s] >= kept[-1][0]:
                continue
            here = slice(int(ends[s] - block.trained_S[s]), int(ends[s]))
            start = int(block.start_S[s])
            whole = slice(start, start + int(block.length_S[s]))
            row = RowSample(
                block.token_N[whole].copy(),
                np.flatnonzero(block.mask_N[whole]),
                block.train_K[here].copy(),
                block.infer_K[here].copy(),
                inside_CK[:, here].copy(),
            )
            kept = sorted([*kept, (float(draw_S[s]), total, row)], key=lambda k: k[:2])[:rows]
    return [row for _, _, row in kept], total


def atoms_inside(block: Rollouts, cuts: Sequence[Cut]) -> Array:
    """Whether each trained token is in each slice, [C, K]."""
    if not cuts:
        return np.zeros((0, len(block.trained_K)), dtype=bool)
    atoms = atoms_of(cuts, PairFields(paired(block, 0)))
    return atoms.inside_CA[:, atoms.atom]


def _batch(rows: Sequence[RowSample]) -> Batch:
    first = [max(int(row.trained_T[0]), 1) for row in rows]
    ends = [int(row.trained_T[-1]) + 1 for row in rows]
    prompts = tuple(tuple(row.token_T[:f].tolist()) for row, f in zip(rows, first, strict=True))
    given = tuple(
        tuple(row.token_T[f:end].tolist()) for row, f, end in zip(rows, first, ends, strict=True)
    )
    return Batch(tuple(range(len(rows))), prompts, max(map(len, given)), given)


def _of_row(row: RowSample, logp: Array) -> Array:
    """The referee's logprob of each trained token; NaN where it has none."""
    first = max(int(row.trained_T[0]), 1)
    scored = np.full(len(row.token_T), np.nan)
    scored[first : first + len(logp)] = logp
    return scored[row.trained_T]
