# What a number rests on beside its inputs: each assumption once, in one sentence, with what
# can test it.  A test can only reject: an assumption is never shown to hold.

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class Assumption:
    """A hypothesis of a theorem.

    Args:
        text: what is assumed, as a sentence without its full stop.
        tested_by: guards and metrics that can reject it; () where no data of a run can.
        kept_by: what in Servanda makes it true of its own runs, and of no trainer's batch; ""
            where nothing does.
    """

    text: str
    tested_by: tuple[str, ...] = ()
    kept_by: str = ""


ASSUMPTIONS: Mapping[str, Assumption] = MappingProxyType(
    {
        "sampler": Assumption(
            "the tokens were drawn from the very distribution whose logprobs infer reports",
            tested_by=("sampler_fidelity", "coherence"),
        ),
        "order": Assumption(
            "what is measured, and in which order, was decided before any outcome",
            kept_by="in Servanda's own runs units are ordered by launch, in closed rounds, with "
            "fresh noise for each; a trainer's batch holds what was done, kept and not aborted",
        ),
        "own_law": Assumption(
            "train answers by the law that it scores with, though it answers by decoding and "
            "scores by the path that it declares",
            tested_by=("sampler_fidelity",),
        ),
        "same_tokens": Assumption(
            "both kernels score the same token ids, the end-of-text step included",
            kept_by="traces are aligned token by token, or refused",
        ),
        "support": Assumption(
            "infer can draw every token that train can",
            tested_by=("support_mass",),
        ),
        "independent": Assumption(
            "prompt groups are independent draws from what the claim speaks of, and what a batch "
            "shares makes none of them diverge together",
            kept_by="prompts are drawn at random, with replacement; that groups of one batch "
            "diverge together is not ruled out",
        ),
        "reward_range": Assumption(
            "the reward lies in the declared range",
            tested_by=("reward_gap",),
        ),
        "same_reward": Assumption(
            "an answer has the same reward, whichever kernel wrote it: a judge or a time limit "
            "that differs between the stacks breaks it"
        ),
        "advantage": Assumption("the advantage of a token is at most the declared one"),
        "score_norm": Assumption("the norm of grad log p is at most the declared one"),
        "token_level": Assumption(
            "the contexts are taken as infer draws them: a bias of the token-level surrogate, "
            "not of the gradient of the expected reward"
        ),
        "constant_divisor": Assumption(
            "what the loss of a batch is divided by does not depend on the tokens drawn, or the "
            "batch is so large that it hardly does"
        ),
        "every_context": Assumption(
            "the drift stays within its bound at every context, those that nobody measured included"
        ),
        "every_token": Assumption(
            "the log-ratio stays within its bound for every token, those never drawn included"
        ),
        "same_filters": Assumption("both kernels sample from the same kept set of tokens"),
        "one_ratio": Assumption(
            "the clipped ratio is train over infer (bypass mode), so that kernel gap and policy "
            "update share one clip range"
        ),
        "true_top_k": Assumption("the tokens returned are the likeliest ones of each kernel"),
        "normal": Assumption("the log-ratio of a sequence is roughly normal"),
    }
)
