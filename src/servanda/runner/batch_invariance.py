# Batch invariance and corners: the infer kernel on given tokens in batches of other shapes.

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from servanda.contract.model import Path
from servanda.engines.base import Engine
from servanda.errors import ContractError
from servanda.judgement.clauses.batch_invariance import Company
from servanda.judgement.clauses.numerical import Corner, CornerRun
from servanda.judgement.plan import Plan
from servanda.runner.golden import against_itself, both, exact_columns
from servanda.runner.run_directory import RunDirectory
from servanda.theory.sampling import Sampling, uniforms
from servanda.traces.corpus import joined
from servanda.traces.trace import Batch, Trace

Ids = tuple[int, ...]
PATHS: tuple[Path, ...] = ("decode", "prefill")  # padded on the left, and on the right
PLAIN = Sampling()  # type: ignore[call-arg]
TEXTS = 32  # prompts used without a golden corpus
CORNER_TEXTS = 8  # texts of a corner with smaller batches


def measure_batches(
    plan: Plan,
    run: RunDirectory,
    infer: Engine,
    golden: Sequence[Ids],
    prompts: Mapping[str, Sequence[Ids]],
) -> dict[str, Company]:
    """Logprobs of each golden text alone and in full batches, on both paths."""
    size = plan.contract.kernels.infer.batch_size
    batch = _texts(plan, run, infer, golden, prompts)
    by_path = {}
    for path in PATHS:
        alone = run.cached(f"batches/{path}.alone", partial(_alone, infer, batch, path))
        together = run.cached(f"batches/{path}.together", partial(infer.score, batch, PLAIN, path))
        by_path[path] = Company(alone.columns["logp"], together.columns["logp"], size)
    return by_path


def _texts(
    plan: Plan,
    run: RunDirectory,
    infer: Engine,
    golden: Sequence[Ids],
    prompts: Mapping[str, Sequence[Ids]],
) -> Batch:
    """The given tokens: golden texts, or prompts with infer's continuations."""
    if golden:
        return _given([(text[:1], text[1:]) for text in golden])
    if not plan.schedules:
        raise ContractError(
            "there are no texts to score: neither golden: nor workload:",
            where=plan.contract.where("runtime"),
            hint="batch_invariance_nats needs golden: {prompts: data/golden.jsonl}",
        )
    schedule = plan.schedules[0]
    firsts = tuple(prompts[schedule.name][:TEXTS])
    batch = Batch(tuple(range(len(firsts))), firsts, schedule.width)
    sampling = schedule.workload.sampling.transform
    draw = partial(infer.generate, batch, sampling, schedule.seed)
    drawn = run.cached("batches/drawn", draw)
    return _given([t for t in zip(firsts, drawn.continuations, strict=True) if t[1]])


def _given(texts: Sequence[tuple[Ids, Ids]]) -> Batch:
    return Batch(
        sequence_S=tuple(range(len(texts))),
        prompts=tuple(prompt for prompt, _ in texts),
        width=max(len(given) for _, given in texts),
        continuations=tuple(given for _, given in texts),
    )


def _alone(infer: Engine, batch: Batch, path: Path) -> Trace:
    """Each text in a batch of one, of its own width."""
    singles = [
        replace(batch.take([row]), width=len(given), together=1)
        for row, given in enumerate(batch.continuations)
    ]
    return Trace.join([infer.score(single, PLAIN, path) for single in singles])


def measure_corners(
    plan: Plan,
    run: RunDirectory,
    engines: Mapping[str, Engine],
    golden: Sequence[Ids],
    watch: Callable[[int, int], None],
) -> dict[str, CornerRun]:
    """Both kernels at every corner of the envelope, infer in batches of the corner's size."""
    corners = sorted(plan.corners, key=lambda corner: corner.name)
    runs = {}
    for number, corner in enumerate(corners):
        watch(number, len(corners))
        runs[corner.name] = _corner(run, engines, corner, _corner_batch(corner, golden))
    watch(len(corners), len(corners))
    return runs


def _corner(
    run: RunDirectory, engines: Mapping[str, Engine], corner: Corner, batch: Batch
) -> CornerRun:
    """The two sides on the corner's texts, and each in other batches."""
    place = f"corners/{corner.batch_size:04d}-{corner.prompt_tokens or 0:06d}"
    sides = {"train": batch, "infer": replace(batch, together=corner.batch_size)}
    paths: dict[str, Path] = {"train": "prefill", "infer": corner.path}
    pair = run.cached(f"{place}.both", lambda: both(sides, engines, paths))
    selves = [
        run.cached(
            f"{place}.self_{side}", partial(against_itself, batch, engines[side], paths[side])
        )
        for side, batch in sides.items()
    ]
    return CornerRun(exact_columns(pair), tuple(map(exact_columns, selves)))


def _corner_batch(corner: Corner, golden: Sequence[Ids]) -> Batch:
    """Texts of the corner's prompt length, from golden token ids in seeded order."""
    order = uniforms(0, corner.name, 0, len(golden)).argsort().tolist()
    texts = [golden[row] for row in order]
    n = corner.prompt_tokens or sorted(map(len, texts))[len(texts) // 2]
    length = n + corner.width
    rows = range(max(corner.batch_size, CORNER_TEXTS))
    # texts this far apart share few tokens
    stride = 1 + length // max(1, sum(map(len, texts)) // len(texts))
    built = [joined(texts, row * stride, length) for row in rows]
    return _given([(text[:n], text[n:]) for text in built])
