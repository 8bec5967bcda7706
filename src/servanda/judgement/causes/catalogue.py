# The causes that a gap can have, and for each the experiment that separates it from its rival.

from __future__ import annotations

from dataclasses import dataclass

from servanda.judgement.breakdown import UNEXPLAINED

RAW = "raw_logprobs"

_SELFTEST = "servanda tools selftest URL"
_PREFLIGHT = "servanda preflight FILE.py:NAME"
_COMPARE = "servanda compare transformers:MODEL@float32 URL"
_REPLICAS = "servanda compare URL_A URL_B"
_STEPS = "servanda check {dir} --steps {step}"
_MASK = "servanda check {dir} --mask masks"


@dataclass(frozen=True)
class Cause:
    """One cause.

    Args:
        words: what it is, for a report; {where} is the label of a slice.
        rival: the cause that looks most like it.
        experiment: what to measure to tell the two apart.
        command: the same as a command; {dir} and {step} are filled in.
    """

    name: str
    words: str
    rival: str
    experiment: str
    command: str


_ALL = (
    Cause(
        "missing_data",
        "missing or foreign data: logprobs that were not recorded, or written as 0",
        "raw_logprobs",
        "whether the engine returns a logprob for each sampled token",
        _SELFTEST,
    ),
    Cause(
        "shift",
        "rows that do not line up: each token has the logprob of another",
        "retokenised",
        "the same sequences, scored by the engine alone",
        _SELFTEST,
    ),
    Cause(
        "replay",
        "routed experts that are not those of the tokens: a replay that is misaligned or dropped",
        "routing",
        "each row of the recorded experts beside the token that was fed for it",
        _STEPS,
    ),
    Cause(
        RAW,
        "raw logprobs: the engine does not report those that it sampled with",
        "temperature",
        "whether the sampled tokens follow the logprobs that the engine reports",
        _SELFTEST,
    ),
    Cause(
        "temperature",
        "a temperature, or another scale of the logits, that one side alone applies",
        "softcap",
        "whether the sampled tokens follow the logprobs that the engine reports",
        _SELFTEST,
    ),
    Cause(
        "top_p",
        "a top-p, a top-k or a min-p that one side alone applies",
        "temperature",
        "whether the sampled tokens follow the logprobs that the engine reports",
        _SELFTEST,
    ),
    Cause(
        "penalty",
        "a repetition penalty that one side alone applies",
        "temperature",
        "whether the sampled tokens follow the logprobs that the engine reports",
        _SELFTEST,
    ),
    Cause(
        "old_weights",
        "staleness: tokens sampled by older weights",
        "stale_weights",
        "whether a sync changes the engine as it changes the trainer",
        _PREFLIGHT,
    ),
    Cause(
        "stale_weights",
        "weights that do not reach the engine, all of them or a part",
        "precision_drift",
        "whether a sync changes the engine as it changes the trainer",
        _PREFLIGHT,
    ),
    Cause(
        "precision_drift",
        "low precision whose error grows with the weights",
        "stale_weights",
        "whether a sync changes the engine as it changes the trainer",
        _PREFLIGHT,
    ),
    Cause(
        "stale_replica",
        "{where}: an engine that keeps old weights",
        "one_engine",
        "whether each replica takes over the weights of a sync",
        "servanda preflight --checkpoint DIR --url URL_A --url URL_B",
    ),
    Cause(
        "one_engine",
        "{where}: its weights, its build, its hardware",
        "stale_replica",
        "that engine against another of the same weights",
        _REPLICAS,
    ),
    Cause(
        "one_kind",
        "requests of {where}: its prompts, its sampling, its tools",
        "template",
        "these prompts alone, through both sides",
        f"{_COMPARE} --prompts FILE",
    ),
    Cause(
        "stale_cache",
        "a prefix cache that outlives a sync looks like this",
        "stale_replica",
        "a sync with the prefix cache reset after it",
        "servanda preflight --checkpoint DIR --url URL",
    ),
    Cause(
        "odd_sequences",
        "a few sequences, which no field of the dump tells apart",
        "stale_cache",
        "these sequences again, each alone",
        _MASK,
    ),
    Cause(
        "retokenised",
        "the first tokens after a tool result, perhaps lost or tokenised differently",
        "template",
        "the token ids that the engine was sent, beside those that the trainer scored",
        _MASK,
    ),
    Cause(
        "template",
        "the beginning of the responses: a chat template, a BOS token, or the end of the prompt",
        "packing",
        "the prompts' token ids on both sides",
        _COMPARE,
    ),
    Cause(
        "packing",
        "state of one sequence that reaches the next: packing, or a cache that is not cleared",
        "template",
        "the trainer's logprobs again, one sequence a batch",
        _MASK,
    ),
    Cause(
        "padding",
        "short prompts: padding that is attended to",
        "template",
        "the same prompts alone and beside a long one",
        _SELFTEST,
    ),
    Cause(
        "batch",
        "a place in the batch: the company of a sequence, a rank, or a micro-batch",
        "one_engine",
        "the same sequences alone and in company",
        _SELFTEST,
    ),
    Cause(
        "blocks",
        "the edges of blocks: a paged cache, a prefill in pieces, or a kernel's tile",
        "attention_window",
        "prompts of these lengths, through both sides",
        f"{_COMPARE} --prompts FILE",
    ),
    Cause(
        "attention_window",
        "attention that does not reach back as far: a window, or a mask",
        "positions",
        "prompts on both sides of this length, through both sides",
        f"{_COMPARE} --prompts FILE",
    ),
    Cause(
        "positions",
        "an error that grows along the answer: positions, or a low-precision cache",
        "attention_window",
        "long prompts in float32, through both sides",
        f"{_COMPARE} --prompts FILE",
    ),
    Cause(
        "end_of_answer",
        "the last tokens of the responses: a length limit, or drafted tokens",
        "missing_data",
        "the engine without speculation, with a larger length limit",
        _SELFTEST,
    ),
    Cause(
        "vocabulary",
        "some token ids: a part of the output head, or of the embedding",
        "head",
        "the output head of both sides, tensor by tensor",
        _PREFLIGHT,
    ),
    Cause(
        "head",
        "the output head: its weights, or its precision",
        "numerics",
        "whether a sync changes the head of the engine",
        _PREFLIGHT,
    ),
    Cause(
        "routing",
        "few tokens anywhere that differ by much: experts chosen differently, or other branches",
        "batch",
        "the same sequences again, with the routed experts of one side",
        _SELFTEST,
    ),
    Cause(
        "softcap",
        "an error that is a function of the logprob: a cap, an epsilon or a scale of the logits",
        "temperature",
        "the logits of both sides on known texts",
        _COMPARE,
    ),
    Cause(
        "numerics",
        "the arithmetic, a constant or the weights of one side, throughout: precision, "
        "quantisation, rope, epsilon, kernels that depend on the batch, or another checkpoint",
        "stale_weights",
        "whether both sides have the same weights, and how large the gap is in float32",
        _PREFLIGHT,
    ),
    Cause(
        UNEXPLAINED,
        "unexplained",
        "numerics",
        "the step with the largest gap by itself",
        _STEPS,
    ),
)
CAUSES = {cause.name: cause for cause in _ALL}
