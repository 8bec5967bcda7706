# What to change where a cause is right, and the experiment on two kernels of a contract.

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from shlex import quote

from servanda.contract.kernel_string import kernel_string
from servanda.contract.model import Kernels
from servanda.errors import ContractError
from servanda.judgement.causes.catalogue import UNEXPLAINED

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
        _relations("draws"),
    ),
    "shift": Remedy(
        "align the arrays: the logprob of a token comes from the logits of the token before it",
        _modules,
    ),
    "replay": Remedy(
        "replay row t of the record, which is of token t as it was fed, for the logprob of token "
        "t + 1, in every layer of every token",
        _modules,
    ),
    "raw_logprobs": Remedy(
        "record the logprobs after the sampling parameters (vLLM: --logprobs-mode "
        "processed_logprobs)",
        _relations("draws"),
    ),
    "temperature": Remedy(
        "apply one temperature on both sides, and record logprobs after it (vLLM: --logprobs-mode "
        "processed_logprobs)",
        _relations("draws"),
    ),
    "top_p": Remedy(
        "sample with top_p 1, top_k -1 and min_p 0, or score with the same filters",
        _relations("draws"),
    ),
    "penalty": Remedy(
        "switch penalties off (vLLM also takes them from generation_config.json: "
        "--generation-config vllm)",
        _relations("draws"),
    ),
    "old_weights": Remedy(
        "allow fewer updates between sampling a token and training on it",
        _sync,
    ),
    "stale_weights": Remedy(
        "send every group of weights in each sync, and reset the engine's caches after it",
        _sync,
    ),
    "precision_drift": Remedy(
        "compute new scales at each sync, or serve the weights without quantisation",
        _modules,
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
        _relations("cache update"),
    ),
    "odd_sequences": Remedy("mask these sequences until the reason is known", _relations("")),
    "retokenised": Remedy("pass token ids between turns, never text", _prompts),
    "template": Remedy(
        "send the token ids that the trainer scores, with one BOS token or none on both sides",
        _prompts,
    ),
    "packing": Remedy(
        "score one sequence a row, or restart positions and attention at each packed sequence",
        _modules,
    ),
    "padding": Remedy(
        "pass the attention mask and the positions with padded prompts, or do not pad",
        _relations("company"),
    ),
    "batch": Remedy(
        "use kernels whose results do not depend on the batch (vLLM: VLLM_BATCH_INVARIANT=1, "
        "SGLang: --enable-deterministic-inference)",
        _relations("company order"),
    ),
    "blocks": Remedy(
        "switch the prefix cache and prefill in pieces off, one after the other (vLLM: "
        "--no-enable-prefix-caching, --no-enable-chunked-prefill)",
        _relations("cache length"),
    ),
    "attention_window": Remedy(
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
        _relations("draws prefill"),
    ),
    "vocabulary": Remedy(
        "give both sides the same vocabulary size, padding and tied embedding",
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
