# The reference scorer of a comparison as a referee: is A or B further from it, on tokens of B.

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from servanda.contract.kernel_string import shown
from servanda.errors import MeasurementError
from servanda.judgement.evidence import Round, round_view
from servanda.judgement.plan import Plan
from servanda.judgement.verdict import Verdict
from servanda.runner.compare.side_distance import ThirdScore, side_distances
from servanda.runner.finished_run import reread_as_measured
from servanda.runner.measurement import Open, Progress, Watch, unwatched
from servanda.runner.probe import encoded
from servanda.runner.round_files import batch_of, in_order
from servanda.traces.trace import Trace

ROWS = 256  # the first responses of B, decided before any is seen


def pair_score(
    folder: Path, verdict: Verdict, open: Open, *, watch: Watch = unwatched
) -> ThirdScore:
    """Let A score responses of B that the referee has scored in a finished comparison.

    In the answer A is `train` and B is `infer`; its rows are responses of B.

    Args:
        folder: the run directory of a comparison with a reference scorer.

    Raises:
        MeasurementError: A cannot score given tokens.
        EvidenceError: the run has no rounds.
    """
    with reread_as_measured(folder, verdict, folder) as run:
        plan, rounds = run.plan, run.rounds
    assert plan.stable is not None  # A of a comparison with a referee
    engine = open(plan.stable, "stable")
    try:
        parts, rows = [], 0
        for measured in rounds:
            if rows >= ROWS:
                break
            watch(Progress("scoring by A", rows, ROWS))
            parts.append(_scored(plan, measured, engine))
            rows += len(measured.units)
    finally:
        engine.close()
    confidence = plan.contract.confidence
    a_N, b_N, referee_N = (np.concatenate([part[i] for part in parts]) for i in range(3))
    names = [*dict.fromkeys(name for part in parts for name in part[3])]
    slices = {
        name: np.concatenate([part[3].get(name, np.zeros(len(part[0]), bool)) for part in parts])
        for name in names
    }
    return ThirdScore(
        shown(plan.contract.kernels.train),
        rows,
        sum(len(measured.units) for measured in rounds),
        confidence,
        side_distances(a_N, b_N, referee_N, slices, 1 - confidence),
    )


def _scored(plan: Plan, measured: Round, engine: Any) -> tuple[Any, Any, Any, dict[str, Any]]:
    """Logprobs of A, of B and of the referee of each token of B, and its slices."""
    schedule = next(s for s in plan.schedules if s.name == measured.workload)
    pair = measured.pair
    given = pair.infer.continuations
    some = [unit for unit, tokens in zip(measured.units, given, strict=True) if tokens]
    tokens = tuple(part for part in given if part)
    batch = batch_of(some, encoded(schedule.corpus, engine), schedule.width, tokens)
    paths = engine.describe().scores
    path = "decode" if "decode" in paths else "prefill"
    if not paths:
        raise MeasurementError(
            "A cannot score given tokens, so it is not known which side is further",
            hint="serve A where prompts can be scored, or name it as a local kernel",
        )
    scored = in_order(batch, engine.score, schedule.workload.sampling.transform, path)
    cells = [cell for cell in plan.cells if cell.workload == measured.workload]
    view = round_view(schedule, cells, measured.units, pair)
    slices = {"all": np.ones(len(pair.infer.token_N), dtype=bool)}
    slices |= {cell.cut.name: view.mask(cell.cut) for cell in cells}
    return (
        _on_tokens(scored, pair.infer),
        pair.infer.columns["logp"],
        pair.train.columns["logp"],
        slices,
    )


def _on_tokens(scored: Trace, drawn: Trace) -> Any:
    """Logprobs by the tokens of another trace; NaN for a sequence that was lost."""
    logp_N = np.full(len(drawn.token_N), np.nan)
    starts = _starts(drawn.sequence_S, drawn.length_S)
    for sequence, (start, length) in _starts(scored.sequence_S, scored.length_S).items():
        if length:
            at = starts[sequence][0]
            logp_N[at : at + length] = scored.columns["logp"][start : start + length]
    return logp_N


def _starts(sequence_S: Any, length_S: Any) -> dict[int, tuple[int, int]]:
    starts = (np.cumsum(length_S) - length_S).tolist()
    return {
        int(s): (start, int(n)) for s, start, n in zip(sequence_S, starts, length_S, strict=True)
    }
