# What an engine is: five verbs over token ids, and three that not every engine has; and two
# that only a server asks for.
# Built-ins and plug-ins implement the same.

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from servanda.contract.identity import Description
from servanda.contract.model import Kernel, Path
from servanda.errors import MeasurementError
from servanda.registry import Registry
from servanda.theory.sampling import Sampling, best_columns
from servanda.traces.request_log import Best
from servanda.traces.trace import Batch, Timing, Trace

AROUND = "(around the model)"  # what an engine does to inputs, cache and logits of its model
CHUNK_ELEMENTS = 1 << 22  # logits travel and are reduced in pieces of about this many


class Engine(Protocol):
    """A kernel that can draw tokens and score given ones."""

    def describe(self) -> Description: ...

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of prompts; no special tokens are added.

        Refused where `describe().encodes` says so.
        """
        ...

    def vocabulary(self) -> list[str]:
        """The token of each id, for messages and for classes of tokens; [] where unknown."""
        ...

    def decode(self, ids: Sequence[Sequence[int]]) -> list[str]:
        """The text of token ids, for rewards.  Refused where `describe().decodes` says so."""
        ...

    def generate(self, batch: Batch, sampling: Sampling, seed: int) -> Trace:
        """Draw up to batch.width tokens for each prompt, by real decoding.

        Draws are `uniforms(seed, "draw", sequence, width)`, so a sequence's tokens do not
        depend on the batch it ran in, but for the kernel's own rounding.  Where the trace has
        best tokens ("id.0", "logp.0", ...), they are only the most likely ones: servers that
        append the drawn token to them (vLLM's `logprobs=k`) have to have it taken out again.
        """
        ...

    def score(self, batch: Batch, sampling: Sampling, path: Path) -> Trace:
        """Processed logprobs of the given continuations, by prefill or by decoding.

        A sequence that no value came back for is lost, and has no tokens in the trace.
        `describe().scores` says which paths there are.
        """
        ...

    def logits(self, batch: Batch, path: Path) -> Iterator[NDArray[np.float32]]:
        """Raw logits [R, V] before each continuation token, in pieces, row after row."""
        ...

    def top(self, batch: Batch, path: Path) -> Trace:
        """The top-k tokens before each continuation token, where full logits are not had.

        Columns: "logp" of the token itself; "id.0", "logp.0", "id.1", ... best first, raw.
        Optional: `describe().top` says how many.
        """
        ...

    def time(self, batch: Batch, sampling: Sampling, seed: int, record: bool) -> Timing:
        """Serve a batch as `generate` does, and say how long its tokens took.

        By the clock of the engine's own process: no pipe is timed.  Without `record` no
        logprob is kept, as in serving.  Optional: `describe().timed` says whether it works.
        """
        ...

    def close(self) -> None: ...


class Served(Engine, Protocol):
    """An engine with what a server asks for beside; each verb is optional."""

    def steps(self, batch: Batch, sampling: Sampling, seed: int, best: int = 0) -> Iterator[Trace]:
        """What `generate` draws, as it is drawn: a trace of one token for each open sequence.

        Sequences that have ended, or do not run yet, have none in it.  `best` columns "id.0",
        "logp.0", ... of the top-k tokens, processed as "logp" is, are recorded beside.
        Anyone who has seen enough closes the iterator.  See `streams`.
        """
        ...

    def render(self, messages: Sequence[Any], tools: Sequence[Any] | None = None) -> str:
        """The text of a chat, by the template of the model.

        Raises:
            MeasurementError: the model has no template.
        """
        ...


_WITHOUT = {
    "generate": "an engine that only scores cannot be infer, nor train where rewards are compared",
    "render": "there is no chat template: send /v1/completions",
    "decode": "a reward reads texts: implement Engine.decode, or leave out reward_gap",
}


def verb_of(engine: Any, verb: str) -> Callable[..., Any]:
    """A verb that an engine may lack.

    Raises:
        MeasurementError: it does.
    """
    method = getattr(engine, verb, None)
    if method is None:
        name = type(engine).__name__
        hint = _WITHOUT.get(verb, "an engine has the verbs of servanda.engines.base.Engine")
        raise MeasurementError(f"the engine {name} has no verb {verb!r}", hint=hint)
    return method


def streams(engine: Any) -> bool:
    """Whether `steps` gives what `generate` does.

    A class that overrides `generate` alone, as faults do, would draw otherwise by the steps
    that it inherits.
    """
    by_class = (vars(cls) for cls in type(engine).__mro__)
    first = next((own for own in by_class if {"generate", "steps"} & own.keys()), {})
    return "steps" in first


# each imports one heavy library, so none is imported before it is asked for
BUILTIN = MappingProxyType(
    {
        "llamacpp": "servanda.engines.llamacpp",
        "onnxruntime": "servanda.engines.onnxruntime",
        "openai_http": "servanda.engines.http",
        "pack": "servanda.engines.recorded",
        "recorded": "servanda.engines.recorded",
        "table": "servanda.engines.table",
        "transformers": "servanda.engines.transformers",
        "vllm": "servanda.engines.vllm",
    }
)


def refuse_misfits(batch: Batch, model: Description) -> None:
    """Let a batch pass whose sequences all fit the model, as far as its sizes are known.

    Raises:
        MeasurementError: an empty prompt, an id that the model does not have, a continuation
            wider than the batch, or a sequence longer than the model's context.
    """
    context, size = model.context, model.vocab_size
    continuations = batch.continuations or ((),) * len(batch)
    for sequence, prompt, given in zip(batch.sequence_S, batch.prompts, continuations, strict=True):
        odd = [token for token in (*prompt, *given) if token < 0 or token >= (size or token + 1)]
        if not prompt:
            problem = "has an empty prompt"
            hint = "give its first token as the prompt"
        elif odd:
            end = f"end at {size - 1}" if size else "begin at 0"
            problem = f"has the token id {odd[0]}, and the model's ids {end}"
            hint = "encode prompts with the tokenizer of this model"
        elif len(given) > batch.width:
            problem = f"has {len(given)} tokens to score in a batch of width {batch.width}"
            hint = "the width of a batch is its longest continuation, or more"
        elif context is not None and len(prompt) + batch.width > context:
            problem = (
                f"needs {len(prompt) + batch.width} tokens ({len(prompt)} of prompt and "
                f"{batch.width} new), and the model's context is {context}"
            )
            hint = "shorten the prompt, or lower max_new_tokens"
        else:
            continue
        raise MeasurementError(f"sequence {sequence} {problem}", hint=hint)


def about_of(batch: Batch, kernel: Kernel, path: Path, sampling: Sampling) -> dict[str, str]:
    """`Trace.about`: how the numbers of a batch came to be."""
    return {
        "path": path,
        "batch_size": str(batch.together or kernel.batch_size),
        "sampling": sampling.model_dump_json(),
    }


def padded_best(steps: Sequence[Best], k: int) -> dict[str, NDArray[np.float64]]:
    """`best_columns` of the top-k tokens of each step; NaN where a step has fewer than k."""
    absent = ((np.nan, np.nan),) * k
    rows = [(*step, *absent)[:k] for step in steps]
    best_NK2 = np.array(rows, dtype=np.float64).reshape(len(rows), k, 2)
    return best_columns(best_NK2[..., 0], best_NK2[..., 1])


# an engine of Servanda is imported when a kernel names it
ENGINES: Registry[Callable[[Kernel], Any]] = Registry("engine", plugins="servanda.engines")
ENGINES.reserve(*BUILTIN)
