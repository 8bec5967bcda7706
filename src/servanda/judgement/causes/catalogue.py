# The causes that a gap can have, and for each the experiment that separates it from its rival, and
# what to change.

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from shlex import quote

from servanda.contract.kernel_string import kernel_string
from servanda.contract.model import Kernels
from servanda.errors import ContractError
from servanda.judgement.breakdown import UNEXPLAINED

RAW = "raw_logprobs"

# What a label is about, by its name.  A cause accuses a side only by labels of that side; any other
# label is of the requests.
ENGINE_LABELS = frozenset({"replica", "engine", "server", "url", "instance"})
TRAINER_LABELS = frozenset({"rank", "dp_rank", "trainer_rank", "micro_batch"})
LABEL_CAUSES = {"cached_tokens": "stale_cache", "weight_version": "old_weights"}
# failed data checks, the most telling first, and the cause that each is
OF_CHECKS = {
    "values": "unsound",
    "coverage": "missing_data",
    "zeros": "missing_data",
    "line_up": "shift",
    "unrelated": "unsound",
    "replay": "replay",
    "routes": "replay",
    "copies": "copies",
    "ends": "unsound",
    "prompts": "unsound",
    "trained": "unsound",
    "loss": "unsound",
    "sides": "unsound",
    "coherence": RAW,
}

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
        words: what it is, for a report; {where} is its place.  "" where the evidence says it all.
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
        "unsound",
        "",
        "missing_data",
        "the rows that the check names",
        _STEPS,
    ),
    Cause(
        "copies",
        "",
        "unsound",
        "the rows that the check names",
        _STEPS,
    ),
    Cause(
        "other_tokens",
        "logprobs of other tokens: of another response, another request, or another context",
        "shift",
        "the same sequences, scored by the engine alone",
        _SELFTEST,
    ),
    Cause(
        "unit",
        "another unit: one side does not write natural logarithms",
        "temperature",
        "the number that the engine returns for one token, beside the one that was written",
        _SELFTEST,
    ),
    Cause(
        "rounding",
        "rounded numbers: one side's logprobs lie on a coarse grid",
        "numerics",
        "the number that the engine returns for one token, beside the one that was written",
        _SELFTEST,
    ),
    Cause(
        "clamp",
        "logprobs that are cut off at a bound",
        "rounding",
        "the number that the engine returns for one token, beside the one that was written",
        _SELFTEST,
    ),
    Cause(
        "steps",
        "{where}, and not the other steps: what was different there",
        "change",
        "these steps by themselves",
        _STEPS,
    ),
    Cause(
        "change",
        "a change, {where} on: a setting, a build or weights since then",
        "stale_weights",
        "the steps before it and after it",
        _STEPS,
    ),
    Cause(
        "one_rank",
        "{where}: a rank of the trainer, its weights, its build, its hardware",
        "one_machine",
        "the same sequences, scored by another rank",
        _MASK,
    ),
    Cause(
        "one_machine",
        "{where}: its engine or its trainer, which the labels do not tell apart",
        "one_engine",
        "its engine against another one of the same weights",
        _REPLICAS,
    ),
    Cause(
        "turns",
        "later turns, scored after another text than the engine had: a history that was repeated, "
        "lost or written anew",
        "retokenised",
        "the token ids that the engine was sent, beside those that the trainer scored",
        _MASK,
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
        "raw logprobs: the engine applies sampling parameters to its draws, and not to the "
        "logprobs that it reports",
        "temperature",
        "whether the sampled tokens follow the logprobs that the engine reports",
        _SELFTEST,
    ),
    Cause(
        "temperature",
        "a temperature, a cap or another scale of the logits, that one side alone applies",
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
        "updates that do not reach the engine as they are: weights, all or a part, that are not "
        "sent, that are rounded on the way or in its format, or that a cache keeps",
        "numerics",
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
        "beginning",
        "these prompts alone, through both sides",
        f"{_COMPARE} --prompts FILE",
    ),
    Cause(
        "stale_cache",
        "a prefix cache with wrong or old entries, or older weights for some of the requests: an "
        "engine among several, or responses that were kept",
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
        "beginning",
        "the token ids that the engine was sent, beside those that the trainer scored",
        _MASK,
    ),
    Cause(
        "beginning",
        "what stands before the answers, which their first tokens or short prompts feel most: a "
        "chat template, a BOS token, padding, or a cached prefix",
        "packing",
        "the prompts' token ids on both sides, and the same prompts alone and beside a long one",
        _COMPARE,
    ),
    Cause(
        "packing",
        "state of one sequence that reaches the next: packing, or a cache that is not cleared",
        "beginning",
        "the trainer's logprobs again, one sequence a batch",
        _MASK,
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
        "long_context",
        "prompts of these lengths, through both sides",
        f"{_COMPARE} --prompts FILE",
    ),
    Cause(
        "long_context",
        "long contexts: attention that does not reach back as far (a window, a mask), or positions "
        "that are wrong from there on",
        "positions",
        "prompts on both sides of this length, through both sides",
        f"{_COMPARE} --prompts FILE",
    ),
    Cause(
        "positions",
        "an error that grows along the context: positions, or a low-precision cache",
        "long_context",
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
        "some token ids: a bias on them, or a part of the output head or of the embedding",
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
        "the arithmetic, a constant, the weights or the context of one side, throughout: "
        "precision, quantisation, rope, epsilon, a cap, kernels that depend on the batch, another "
        "checkpoint, or other tokens before each prompt",
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


# What to change where a cause is right, and the experiment on two kernels of a contract.


Test = Callable[["Sides"], str]


@dataclass(frozen=True)
class Sides:
    """The kernels of a contract, as a command takes them.

    Args:
        contract: path of the contract; "" if it has none.
    """

    kernels: Kernels
    contract: str = ""

    @property
    def pair(self) -> str:
        """Train and infer as kernel strings; "" where one has none."""
        try:
            texts = [kernel_string(k) for k in (self.kernels.train, self.kernels.infer)]
        except ContractError:
            return ""
        return " ".join(map(quote, texts))


def _relations(names: str) -> Test:
    only = "".join(f" --only {name}" for name in names.split())

    def command(sides: Sides) -> str:
        if sides.contract:
            return f"servanda relations {quote(sides.contract)}{only}"
        try:
            return f"servanda relations {quote(kernel_string(sides.kernels.infer))}{only}"
        except ContractError:
            return ""

    return command


def _prompts(sides: Sides) -> str:
    return f"servanda compare {sides.pair} --prompts FILE" if sides.pair else ""


def _modules(sides: Sides) -> str:
    """Bisection where both kernels run here; otherwise a third scorer."""
    if not sides.pair:
        return ""
    if sides.kernels.train.engine == sides.kernels.infer.engine == "transformers":
        return f"servanda bisect {sides.pair}"
    return f"servanda compare {sides.pair} --referee transformers:MODEL@float32"


def _sync(_: Sides) -> str:
    return "servanda preflight --checkpoint DIR --url URL"


@dataclass(frozen=True)
class Remedy:
    """What helps where a cause is right.

    Args:
        switch: what to change.
        test: the experiment on two kernels, as a command.
    """

    switch: str
    test: Test


REMEDIES: Mapping[str, Remedy] = {
    "missing_data": Remedy(
        "request a logprob for every sampled token, and mask tokens that have none",
        _relations("sampling"),
    ),
    "shift": Remedy(
        "align the arrays: the logprob of a token comes from the logits of the token before it",
        _modules,
    ),
    "unsound": Remedy("repair the rows that the check names, or leave them out", _modules),
    "copies": Remedy("write each row once", _modules),
    "other_tokens": Remedy(
        "pair the two sides by the id of a request and of a token, not by their order", _modules
    ),
    "unit": Remedy("write natural logarithms on both sides", _modules),
    "rounding": Remedy("write logprobs in float32 on both sides", _modules),
    "clamp": Remedy("write logprobs as they are, without a bound", _modules),
    "steps": Remedy("leave these steps out until the reason is known", _modules),
    "change": Remedy("undo what changed at this step", _modules),
    "one_rank": Remedy(
        "give this rank of the trainer the weights and the build of the others", _modules
    ),
    "one_machine": Remedy("take this machine out until the reason is known", _modules),
    "turns": Remedy("pass the token ids of the whole history between turns, never text", _prompts),
    "replay": Remedy(
        "replay row t of the record, which is of token t as it was fed, for the logprob of token "
        "t + 1, in every layer of every token",
        _modules,
    ),
    "raw_logprobs": Remedy(
        "record the logprobs after the sampling parameters (vLLM: --logprobs-mode "
        "processed_logprobs)",
        _relations("sampling"),
    ),
    "temperature": Remedy(
        "apply one temperature on both sides, and record logprobs after it (vLLM: --logprobs-mode "
        "processed_logprobs)",
        _relations("sampling"),
    ),
    "top_p": Remedy(
        "sample with top_p 1, top_k -1 and min_p 0, or score with the same filters",
        _relations("sampling"),
    ),
    "penalty": Remedy(
        "switch penalties off (vLLM also takes them from generation_config.json: "
        "--generation-config vllm)",
        _relations("sampling"),
    ),
    "old_weights": Remedy(
        "allow fewer updates between sampling a token and training on it",
        _sync,
    ),
    "stale_weights": Remedy(
        "send every group of weights in each sync, compute new scales, and reset the engine's "
        "caches after it",
        _sync,
    ),
    "stale_replica": Remedy("take this replica out until it has the new weights", _sync),
    "one_engine": Remedy(
        "take this replica out, or give it the build, the parallelism and the hardware of the "
        "others",
        _modules,
    ),
    "one_kind": Remedy(
        "give these requests the sampling parameters and the chat template of the others",
        _prompts,
    ),
    "stale_cache": Remedy(
        "reset the prefix cache after each sync (vLLM: reset_prefix_cache, SGLang: /flush_cache)",
        _relations("prefix-cache update"),
    ),
    "odd_sequences": Remedy("mask these sequences until the reason is known", _relations("")),
    "retokenised": Remedy("pass token ids between turns, never text", _prompts),
    "beginning": Remedy(
        "send the token ids that the trainer scores, with one BOS token or none on both sides, and "
        "the attention mask and the positions with padded prompts",
        _prompts,
    ),
    "packing": Remedy(
        "score one sequence a row, or restart positions and attention at each packed sequence",
        _modules,
    ),
    "batch": Remedy(
        "use kernels whose results do not depend on the batch (vLLM: VLLM_BATCH_INVARIANT=1, "
        "SGLang: --enable-deterministic-inference)",
        _relations("batching order"),
    ),
    "blocks": Remedy(
        "switch the prefix cache and prefill in pieces off, one after the other (vLLM: "
        "--no-enable-prefix-caching, --no-enable-chunked-prefill)",
        _relations("prefix-cache prompt-length"),
    ),
    "long_context": Remedy(
        "use the same attention window and the same rope scaling on both sides",
        _modules,
    ),
    "positions": Remedy(
        "keep position ids and rope in float32, and the cache in the model's precision (vLLM: "
        "--kv-cache-dtype auto)",
        _modules,
    ),
    "end_of_answer": Remedy(
        "switch speculation off, and raise the length limit",
        _relations("sampling prefill-decode"),
    ),
    "vocabulary": Remedy(
        "send no bias on tokens that the trainer does not apply, and give both sides the same "
        "vocabulary size, padding and tied embedding",
        _modules,
    ),
    "head": Remedy("compute the output head in float32 on both sides", _modules),
    "routing": Remedy(
        "replay the engine's routed experts in the trainer (vLLM: --enable-return-routed-experts)",
        _modules,
    ),
    "softcap": Remedy(
        "use the same softcap, epsilon and scale of the logits on both sides",
        _modules,
    ),
    "numerics": Remedy(
        "serve in the trainer's precision, or train on the quantised weights; compare both "
        "configurations",
        _modules,
    ),
    UNEXPLAINED: Remedy("", _modules),
}
