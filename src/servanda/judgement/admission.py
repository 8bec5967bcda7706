# Admission: checks the contract's declarations against the engines' descriptions and records.
#
# Refused before measuring: a limit below the resolution of the record (law 9), and a prompt outside
# the envelope.  Refused while measuring: a trace that was not made as declared, or lacks a column
# listed in `observability.record` (law 7).

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from servanda.contract.identity import GRADES, Description, Grade
from servanda.contract.model import Contract, Kernel
from servanda.contract.workload import Path
from servanda.errors import ContractError, IdentityError, MeasurementError, Problem, Where
from servanda.judgement.clauses.base import FORMAT, Cell
from servanda.theory.divergence.precision import CAPTURES, TYPICAL_NATS, capture_floor, eta
from servanda.theory.sampling import Sampling
from servanda.traces.corpus import Corpus
from servanda.traces.trace import Trace

if TYPE_CHECKING:
    from servanda.judgement.plan import Plan

_SHOWN = 5  # lines printed per file; the rest is counted
_ABOUT = ("path", "batch_size", "sampling")


def path_of(kernel: Kernel, side: str) -> Path:
    """The path by which a side scores tokens; default: infer by decode, train by prefill."""
    return kernel.path or ("prefill" if side in ("train", FORMAT) else "decode")


def refuse_unscored(train: Kernel, description: Description) -> None:
    """Refuse a train kernel that cannot score infer's tokens by its declared path.

    Raises:
        MeasurementError: it cannot.
    """
    path = path_of(train, "train")
    if path not in description.scores:
        can = " or ".join(description.scores)
        raise MeasurementError(
            f"the train engine {train.engine!r} cannot score given tokens by {path}",
            hint=f"declare kernels.train.path: {can}"
            if can
            else "let it be infer, the side that draws (B of `compare`), and let a kernel that "
            "scores prompts be train: `compare` and `selftest` take one by --referee KERNEL",
        )


def refuse_weak_identity(contract: Contract, grade: Grade) -> None:
    """Refuse weights with a weaker identity than `weights.identity` requires (law 8).

    Raises:
        IdentityError: they are.
    """
    wanted = contract.weights.identity
    if wanted is not None and GRADES.index(grade) > GRADES.index(wanted):
        raise IdentityError(
            f"the weights of the two sides are {grade} to be the same, and the contract wants "
            f"them {wanted}",
            where=contract.where("weights", "identity"),
            hint="open a kernel that loads the checkpoint, write its digest as weights_from, or "
            f"accept weights: {{identity: {grade}}}",
        )


def refuse_unresolved(plan: Plan, descriptions: Mapping[str, Description]) -> None:
    """Refuse a limit below the effect of rounding the records (law 9).

    Raises:
        ContractError: at each such limit.
    """
    for side, description in descriptions.items():
        if description.capture not in CAPTURES:
            raise MeasurementError(
                f"the {side} engine records its logprobs as {description.capture!r}",
                hint=f"Description.capture is one of {', '.join(CAPTURES)}",
            )
    sides = ("train", "infer")
    side = min(sides, key=lambda side: CAPTURES[descriptions[side].capture])
    capture = descriptions[side].capture
    problems = {}
    for cell in plan.cells:
        limit, floor = cell.clause.at_most, _floor(cell, capture)
        if isinstance(limit, float) and limit < floor:
            metric = f"{cell.clause.aggregate or ''} {cell.clause.metric}".strip()
            problems[cell.place] = Problem(
                f"clause {cell.clause.id!r} wants {metric} at most {limit:g}, and {side} records "
                f"its logprobs as {capture}: rounding alone reads as {floor:.1e} on tokens of "
                f"about {TYPICAL_NATS:g} nats",
                plan.contract.where(*cell.place, "at_most"),
                f"write a limit above {floor:.1e}, or let the engine record float32 or float64",
            )
    if problems:
        raise ContractError.all([*problems.values()])


def _floor(cell: Cell, capture: str) -> float:
    if cell.kind.source == "batches":
        # bits are compared exactly: only a limit below one bit cannot be distinguished from 0
        return eta(capture) if cell.clause.at_most else 0.0
    if cell.kind.source != "workload":
        return 0.0  # full logits are reduced at once, not recorded
    return capture_floor(cell.clause.metric, capture, cell.clause.aggregate or "mean")


def refuse_corners(plan: Plan, descriptions: Mapping[str, Description]) -> None:
    """Refuse corners of the envelope that the kernels cannot run.

    Raises:
        ContractError: a corner exceeds the model's context.
    """
    context = min((d.context for d in descriptions.values() if d.context), default=None)
    for corner in plan.corners:
        prompt = corner.prompt_tokens or 1
        if context is not None and prompt + corner.width > context:
            raise ContractError(
                f"the envelope promises prompts of {prompt} tokens; with {corner.width} new ones "
                f"they exceed the model's context of {context}",
                where=plan.contract.where("runtime", "envelope", "prompt_tokens"),
                hint=f"promise at most {context - corner.width} prompt tokens",
            )


def refuse_long(
    plan: Plan,
    descriptions: Mapping[str, Description],
    prompts: Mapping[str, Sequence[tuple[int, ...]]],
) -> None:
    """Refuse loads whose requests the kernels cannot run.

    Raises:
        ContractError: a load exceeds the model's context.
    """
    context = min((d.context for d in descriptions.values() if d.context), default=None)
    for cell in plan.cells:
        load = cell.kind.load
        if load is None or context is None:
            continue
        longest = load.prompt_tokens or max(map(len, prompts[load.workload]))
        if longest + load.new_tokens > context:
            raise ContractError(
                f"clause {cell.clause.id!r} times requests of {longest} prompt tokens and "
                f"{load.new_tokens} new ones, which exceed the model's context of {context}",
                where=plan.contract.where(*cell.place, "load"),
                hint="lower load.prompt_tokens or load.new_tokens",
            )


def refuse_unfit(
    corpus: Corpus,
    ids: Sequence[tuple[int, ...]],
    width: int,
    descriptions: Sequence[Description],
    advice: str = "",
) -> None:
    """Refuse lines with unknown ids, or without context for `width` new tokens.

    Args:
        advice: hint if the lines cannot be changed.

    Raises:
        ContractError: naming the lines.
    """
    context = min((d.context for d in descriptions if d.context is not None), default=None)
    known = [d.vocab_size for d in descriptions if d.vocab_size]
    vocabulary = min(known, default=math.inf)
    problems = []
    for prompt, tokens in zip(corpus.prompts, ids, strict=True):
        where = Where(corpus.file, prompt.line, 1)
        if not tokens or max(tokens) >= vocabulary:
            what = f"id {max(tokens)}" if tokens else "no token at all"
            message = f"{what} in a prompt for a vocabulary of {vocabulary} ids"
            problems.append(Problem(message, where, advice))
        elif context is not None and len(tokens) + width > context:
            new = f" and {width} new ones" if width else ""
            message = f"a prompt of {len(tokens)} tokens{new} exceeds the context of {context}"
            hint = advice or "shorten or drop the line, or lower max_new_tokens"
            problems.append(Problem(message, where, hint))
    _refuse_lines(corpus, problems)


def _refuse_lines(corpus: Corpus, problems: list[Problem]) -> None:
    more = len(problems) - _SHOWN
    rest = [Problem(f"{corpus.file}: {more} more lines like these")] if more > 0 else []
    if problems:
        raise ContractError.all([*problems[:_SHOWN], *rest])


def refuse_outside(contract: Contract, corpus: Corpus, ids: Sequence[tuple[int, ...]]) -> None:
    """Refuse prompts of a workload outside the length range of the envelope.

    Raises:
        ContractError: naming the lines.
    """
    envelope = contract.runtime.envelope
    if envelope is None or envelope.prompt_tokens is None:
        return
    low, high = envelope.prompt_tokens
    hint = "drop the line, or widen runtime.envelope.prompt_tokens"
    if envelope.outside == "stable":
        hint += "; runtime.envelope.outside routes such requests to stable"
    problems = [
        Problem(
            f"a prompt of {len(tokens)} tokens lies outside the envelope the contract concerns "
            f"({low:g} to {high:g})",
            Where(corpus.file, prompt.line, 1),
            hint,
        )
        for prompt, tokens in zip(corpus.prompts, ids, strict=True)
        if not low <= len(tokens) <= high
    ]
    _refuse_lines(corpus, problems)


def as_declared(
    trace: Trace,
    side: str,
    kernel: Kernel,
    path: Path,
    sampling: Sampling,
    description: Description,
    record: Sequence[str],
) -> Trace:
    """Return the trace if it was made as the contract declares (law 7).

    Raises:
        MeasurementError: another path, batch size or sampling; or a column of
            `observability.record` is missing.
    """
    engine = f"the {side} engine {kernel.engine!r}"
    declared = {
        "path": path,
        "batch_size": str(kernel.batch_size),
        "sampling": sampling.model_dump_json(),
    }
    for item in _ABOUT:
        recorded = trace.about.get(item)
        if recorded is not None and _plain(recorded) != _plain(declared[item]):
            drawn = item == "path" and path != path_of(kernel, side)  # the path concerns scoring
            by = "answers are drawn by" if drawn else "the contract declares"
            raise MeasurementError(
                f"{engine} recorded {item} {recorded}, and {by} {declared[item]}",
                hint="numbers made otherwise do not concern this contract: scoring a prompt "
                "does not certify decoding, nor one sampling another",
            )
    there = {
        "fingerprint": bool(description.fingerprint),
        "token_ids": not len(trace.token_N) or int(trace.token_N.min()) >= 0,
        "processed_logprobs": "logp" in trace.columns,
        **{item: item in trace.about for item in _ABOUT},
    }
    for item in record:
        if not there[item]:
            raise MeasurementError(
                f"{engine} does not record {item}, which observability.record asks for",
                hint=f"take {item} out of observability.record, or let the engine record it",
            )
    return trace


def _plain(recorded: str) -> object:
    """A canonical form: {"a":1} and { "a": 1 } are equal."""
    try:
        return json.loads(recorded)
    except ValueError:
        return recorded
