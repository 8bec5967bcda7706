# The assumptions of a number beyond its inputs: each once, in one sentence, with its tests.  A test
# can only reject: an assumption is never shown to hold.

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class Assumption:
    """A hypothesis of a theorem.

    Args:
        text: the assumption, as a sentence without its full stop.
        tested_by: validity checks and metrics that can reject it; () if no data of a run can.
        kept_by: the mechanism that makes it true in Servanda's own runs, but not in a trainer's
            batch; "" if none.
    """

    text: str
    tested_by: tuple[str, ...] = ()
    kept_by: str = ""


ASSUMPTIONS: Mapping[str, Assumption] = MappingProxyType(
    {
        "sampler": Assumption(
            "the infer kernel sampled the tokens from the distribution whose logprobs it reports",
            tested_by=("sampler_fidelity", "coherence"),
        ),
        "order": Assumption(
            "order and inclusion of the units were decided before any outcome",
            kept_by="in Servanda's own runs units are ordered by dispatch, in closed rounds, with "
            "fresh noise for each; a trainer's batch has the finished units that were kept",
        ),
        "own_law": Assumption(
            "the train kernel samples from the distribution that it scores with, though it "
            "samples by decoding and scores by the path that it declares",
            tested_by=("sampler_fidelity",),
        ),
        "same_tokens": Assumption(
            "both kernels score the same token ids, the end-of-text step included",
            kept_by="traces are aligned token by token, or refused",
        ),
        "support": Assumption(
            "the infer kernel can sample every token that the train kernel can",
            tested_by=("support_mass",),
        ),
        "independent": Assumption(
            "prompt groups are independent samples from the population of the claim, and nothing "
            "shared by a batch makes them diverge together",
            kept_by="prompts are sampled at random, with replacement; that groups of one batch "
            "diverge together is not ruled out",
        ),
        "reward_range": Assumption(
            "the reward lies in the declared range",
            tested_by=("reward_gap",),
        ),
        "same_reward": Assumption(
            "a response has the same reward, whichever kernel generated it: a judge or a time "
            "limit that differs between the stacks breaks it"
        ),
        "same_environment": Assumption(
            "tools and users answer both kernels by the same law, given the conversation so far: "
            "a tool that times out, or a state that the text does not show, breaks it"
        ),
        "advantage": Assumption("the advantage of a token is at most the declared one"),
        "score_norm": Assumption("the norm of grad log p is at most the declared one"),
        "token_level": Assumption(
            "the contexts are sampled by the infer kernel: a bias of the token-level surrogate, "
            "not of the gradient of the expected reward"
        ),
        "constant_divisor": Assumption(
            "the divisor of a batch's loss does not depend on the sampled tokens, or the batch is "
            "so large that it hardly does"
        ),
        "every_context": Assumption(
            "the drift stays within its bound at every context, also at those never measured"
        ),
        "every_token": Assumption(
            "the log ratio stays within its bound for every token, also for those never sampled"
        ),
        "same_filters": Assumption("both kernels sample from the same kept set of tokens"),
        "one_ratio": Assumption(
            "the clipped ratio is train over infer (bypass mode), so that kernel gap and policy "
            "update share one clip range"
        ),
        "true_top_k": Assumption("the returned tokens are the top-k of each kernel"),
        "normal": Assumption("the log-ratio of a sequence is roughly normal"),
        "independent_rows": Assumption(
            "given the trainer's change, the rounding of a row is symmetric about 0 and "
            "independent of that of other rows"
        ),
        "load": Assumption(
            "the load of an engine changes neither its draws nor its rounding beyond what was "
            "measured"
        ),
        "exchangeable_runs": Assumption(
            "the good runs and a healthy run are exchangeable: one set-up, and no order among them"
        ),
        "reference_runs": Assumption(
            "all good runs that were made are in the reference: none was left out or chosen by its "
            "gap"
        ),
    }
)
