# Bitwise: compares bit-equal columns with the contract's declarations about the kernels.

from __future__ import annotations

from servanda.contract.model import EXTERNAL, Contract, Kernels
from servanda.theory.stats.agreement import ENOUGH, INFORMATIVE, Agreement

# of one kernel under other settings
_BESIDE = {"title", "path", "batch_size", "python", "timeout_s", "key_env"}
_COARSE = (
    *("bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2"),
    *("fp8_per_token_head", "int8_per_token_head", "q8_0", "q4_0"),
)
SAME = "both sides' logprobs are equal in every bit"
DECLARE = "declare `bitwise: true` in the contract"


def objection(contract: Contract, counts: Agreement) -> str:
    """The reason why the two columns cannot be evidence; "" if they can.

    If the kernels run here, some sequences may be equal and others not, for example with a fault
    beyond some length.  A trainer's columns have no such reason.
    """
    if contract.bitwise or counts.tokens < ENOUGH:
        return ""
    if counts.everywhere:
        return (
            f"{SAME}, on all {counts.tokens:,} tokens that could differ (probability below "
            f"{INFORMATIVE:g}): one column was copied (a bypass mode, an engine that is the "
            "trainer, or one that reports its logprobs), or the kernels really are bitwise equal; "
            f"if they are, {DECLARE}"
        )
    if contract.kernels.infer.engine == EXTERNAL and counts.mixed:
        return (
            f"{SAME} in {counts.copies:,} of {counts.sequences:,} sequences, and differ in the "
            "others: those were copied from one side to the other, or only a part of the kernels "
            f"is bitwise equal; if that is so, {DECLARE}"
        )
    if contract.kernels.infer.engine == EXTERNAL and counts.mostly:
        return (
            f"{SAME} on {counts.equal:,} of {counts.tokens:,} tokens that could differ, and "
            f"{counts.close:,} of {counts.sequences:,} sequences differ at a few tokens alone, by "
            "more than rounding: most of a column was copied from one side to the other, or only a "
            f"part of the kernels is bitwise equal; if that is so, {DECLARE}"
        )
    return ""


def remarks(contract: Contract, counts: Agreement) -> tuple[str, ...]:
    """The open questions about equal or nearly equal columns, one sentence each."""
    sentences = []
    if counts.everywhere and contract.bitwise:
        sentences.append(
            f"{SAME}, on all {counts.tokens:,} tokens that could differ, as `bitwise: true` "
            "declares: this run could not have shown a disagreement"
        )
    elif counts.everywhere:
        sentences.append(
            f"{SAME}, and only {counts.tokens:,} of the tokens have a probability below "
            f"{INFORMATIVE:g}: too few to say whether a column was copied"
        )
    elif counts.tokens and contract.bitwise:
        sentences.append(
            f"`bitwise: true` is declared, and {counts.tokens - counts.equal:,} of "
            f"{counts.tokens:,} tokens that could differ do, by {counts.mean_distance:.1e} nats on "
            "average"
        )
    elif counts.tokens >= ENOUGH and counts.copies > 1:
        sentences.append(
            f"{SAME} in {counts.copies:,} of {counts.sequences:,} sequences: on them the two sides "
            "are one program, or one column was copied"
        )
    elif counts.tokens >= ENOUGH and counts.mostly:
        sentences.append(
            f"{SAME} on {counts.equal:,} of {counts.tokens:,} tokens that could differ, though the "
            "others differ by more than rounding: in part the two sides are one program, or a "
            "column was copied"
        )
    coarse = "" if contract.bitwise or not counts.one_program else _coarse(contract.kernels)
    if coarse:
        sentences.append(
            f"where the two sides differ, it is by float32 rounding ({counts.mean_distance:.1e} "
            f"nats on average), and {coarse}: both sides look like one program"
        )
    return tuple(sentences)


def _coarse(kernels: Kernels) -> str:
    """The side that should differ by more than float32 rounding, with the reason."""
    train, infer = (k.model_dump(exclude=_BESIDE) for k in (kernels.train, kernels.infer))
    if train == infer and kernels.infer.engine != EXTERNAL:
        return ""  # one kernel compared with itself
    for side in ("infer", "train"):
        kernel = getattr(kernels, side)
        if kernel.engine == EXTERNAL or kernel.url is not None:
            return f"{side} would differ a thousand times more were it bfloat16 or quantised"
        coarse = (kernel.dtype, kernel.head_dtype, kernel.kv_cache)
        rounded = kernel.quantization or next((c for c in coarse if c in _COARSE), "")
        if rounded:
            return f"{side} is declared {rounded}"
    return ""
