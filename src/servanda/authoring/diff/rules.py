# Every field of the language, and how a move of it is read; a test holds it against the models.
#
# What is not in the contract's digest and only says where something runs, or what people call
# it, is cosmetic.  What is in the digest and has no tighter end is retargeted: other evidence
# is needed, and neither version keeps the other.

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from pydantic import BaseModel

from servanda.authoring.diff import clause_rules
from servanda.authoring.diff.directions import (
    NEVER,
    Custom,
    Handling,
    Items,
    Part,
    With,
    cosmetic,
    higher,
    inclusion,
    lower,
    other,
    ranked,
    wider,
)
from servanda.contract import clause, model, objective, policy, workload
from servanda.theory.sampling import Sampling

Fields = Mapping[str, Handling]

_WHERE_IT_RUNS = "where a kernel runs does not change what it computes"
_OTHER_KERNEL = "it computes something else"
_OTHER_DRAWS = "the tokens are drawn from another distribution"
_RE_ROLL = "other draws of the same; to choose among them is a re-roll that nothing pays for"
_FOR_PEOPLE = "it is for people"
_NAME = other("it is found again by this", says="removed, and added")

_KERNEL: Fields = {
    "engine": other(_OTHER_KERNEL),
    "model": other("another file may hold other weights; evidence is kept by their digest too"),
    "url": cosmetic(_WHERE_IT_RUNS),
    "served": other("a server may have several models"),
    "dialect": other("another kind of server"),
    "logprobs": other("logprobs before and after the sampling are not the same numbers"),
    "sampling_defaults": cosmetic("each row of traffic says what it was sampled with"),
    "timeout_s": cosmetic(_WHERE_IT_RUNS),
    "key_env": cosmetic(_WHERE_IT_RUNS),
    "python": cosmetic(_WHERE_IT_RUNS),
    "title": cosmetic(_FOR_PEOPLE),
    "dtype": other(_OTHER_KERNEL),
    "attention": other(_OTHER_KERNEL),
    "quantization": other(_OTHER_KERNEL),
    "path": other(_OTHER_KERNEL),
    "batch_size": other("rounding depends on what runs together"),
    "sampling": Part("train's own transform; without it, the workload's"),
    "mask": other(_OTHER_DRAWS),
    "weights_from": other("other weights"),
    "fault": other(_OTHER_KERNEL),
}
_SAMPLING: Fields = {
    "temperature": other(_OTHER_DRAWS),
    "top_k": other(_OTHER_DRAWS),
    "top_p": other(_OTHER_DRAWS),
    "min_p": other(_OTHER_DRAWS),
}
_WORKLOAD: Fields = {
    "source": other("other tokens"),
    "prompts": other("another file may hold other texts; evidence is kept by their digest too"),
    "mode": other("tokens that infer draws, or that are given"),
    "samples": other(_RE_ROLL),
    "sampling": Part(""),
    "round": other(_RE_ROLL),
}
_CLAUSE: Fields = {
    "id": _NAME,
    "metric": other("another quantity"),
    "aggregate": clause_rules.AGGREGATE,
    "at_most": Part("", scalar=clause_rules.LIMIT, none="tightened", says="lower is tightened"),
    "at_least": Part("", scalar=clause_rules.LIMIT, none="tightened", says="higher is tightened"),
    "clip": other("a mean of values that are cut elsewhere is another quantity"),
    "severity": ranked("warning", "error", "critical", why="a warning fails nothing"),
    "mode": ranked("monitor", "enforce", why="what is monitored fails nothing"),
    "slices": Custom(
        "superset is tightened", "judged by itself in more places", clause_rules.slices
    ),
    "workload": Custom("retargeted", "judged on other texts", clause_rules.workload),
    "stages": inclusion("judged at more stages"),
    "claim": Custom(
        "retargeted", "tomorrow's tokens, or those that were measured", clause_rules.claim
    ),
    "required": ranked(False, True, why="what cannot be measured is an error, not passed over"),
    "load": Part("the conditions in which a time is measured"),
    "over": other("another stretch of traffic"),
}
_STAGE: Fields = {
    "sequences": clause_rules.SEQUENCES,
    "share": clause_rules.SHARE,
    "sample": clause_rules.SAMPLE,
    "steps": clause_rules.STEPS,
    "dwell": higher("each step is watched for longer", absent=0.0, time=True),
    "approval": ranked("none", "required", why="a person has to agree"),
    "if_inconclusive": ranked(
        "wait", "hold", "roll_back", why="each takes more from a kernel that was not shown"
    ),
}
_CONTRACT: Fields = {
    "apiVersion": other("another language"),
    "kind": other("another document"),
    "metadata": Part(""),
    "kernels": Part(""),
    "stable": Part("who serves when infer may not, and what limits may be relative to"),
    "weights": Part(""),
    "bitwise": ranked(True, False, why="columns that are equal in every bit are then no evidence"),
    "workload": Items(
        "the texts that promises are judged on",
        "workload",
        says="item by item, by name; added, removed; another first is retargeted",
        first="the first is what traffic is, and what a clause is judged on that names none",
    ),
    "workloads": With("workload", "a single one is one of several"),
    "golden": Part("the texts that numerical promises are judged on"),
    "labels": Items("labels cut live traffic", "label"),
    "slices": Items("a part of the tokens that is judged by itself", "slice"),
    "confidence": higher("a wrong answer is less likely"),
    "claim": other("tomorrow's tokens, or those that were measured"),
    "reward": Part("what drifts of a reward are bounds of"),
    "gradient": Part("what biases of a gradient are bounds of"),
    "numerical": Items("a promise", "clause", says="by `id`, through all sections; added, removed"),
    "statistical": With("numerical", ""),
    "runtime": Part(""),
    "observability": Part(""),
    "escalation": Items("what follows from a verdict", "rule", says="by `when`; added, removed"),
    "routing": Part(""),
    "promotion": Part(""),
}

RULES: Mapping[type[BaseModel], Fields] = MappingProxyType(
    {
        model.Contract: _CONTRACT,
        model.Metadata: {
            "name": other("evidence and runs are kept by it"),
            "version": cosmetic(_FOR_PEOPLE),
            "title": cosmetic(_FOR_PEOPLE),
            "description": cosmetic(_FOR_PEOPLE),
            "annotations": cosmetic(_FOR_PEOPLE),
        },
        model.Kernels: {"train": Part(""), "infer": Part("")},
        model.Kernel: _KERNEL,
        Sampling: _SAMPLING,
        workload.WorkloadSampling: {
            **_SAMPLING,
            "max_new_tokens": other("longer answers are other tokens"),
            "seed": other(_RE_ROLL),
        },
        model.Weights: {
            "identity": ranked(
                None, "declared", "derived", "verified", why="a better proof of equal weights"
            ),
            "changes": other("one set of weights, or one a step"),
        },
        workload.Workload: _WORKLOAD,
        workload.NamedWorkload: {**_WORKLOAD, "name": _NAME},
        workload.Golden: {
            "prompts": _WORKLOAD["prompts"],
            "path": other("another program scores them"),
        },
        workload.LabelSource: {"source": other("traffic is cut by something else")},
        clause.SliceRule: {
            "name": _NAME,
            "split": other("other tokens"),
            "match": other("other tokens"),
            "at": clause_rules.EDGES,
            "most": clause_rules.MOST,
        },
        objective.Reward: {
            "range": wider("the same bound, for more rewards"),
            "of": other("another reward"),
        },
        objective.Gradient: {
            "advantage": Part(
                "", scalar=higher("the same bias, times more"), says="higher is tightened"
            ),
            "score_norm": Part(
                "",
                scalar=higher("the same bias, times more"),
                says="higher is tightened; `logit_space` to or from a number is retargeted",
            ),
            "weighting": Part("", scalar=other("another estimator"), says="retargeted"),
            "loss": other("another estimator"),
            "clip_range": other("a share of another range"),
            "ratio": other("another estimator"),
        },
        objective.GroupAdvantage: {
            "group_size": higher("the largest advantage grows with the group"),
            "std": other("advantages of another scale"),
        },
        objective.Weighting: dict.fromkeys(
            objective.Weighting.model_fields, other("another estimator")
        ),
        model.Clause: _CLAUSE,
        clause.Relative: {
            "times": clause_rules.LIMIT,
            "of": other("a multiple of something else"),
        },
        clause.Load: {
            "concurrency": clause_rules.CONCURRENCY,
            "new_tokens": other("other requests"),
            "prompt_tokens": other("other requests"),
        },
        model.Runtime: {
            "envelope": Part("the conditions in which promises were shown, and who serves outside"),
            "clauses": With("numerical", ""),
        },
        model.Envelope: {
            "batch_size": wider("shown, and served, in more conditions"),
            "prompt_tokens": wider("shown, and served, in more conditions"),
            "path": other(_OTHER_KERNEL),
            "outside": ranked(
                "infer", ("stable", "refuse"), why="infer promises nothing of what lies outside"
            ),
        },
        model.Observability: {
            "record": inclusion("more of what happened can be looked at"),
            "clauses": With("numerical", ""),
        },
        policy.Escalation: {
            "when": _NAME,
            "do": clause_rules.ACTIONS,
        },
        policy.Routing: {
            "mode": ranked("observe", "enforce", why="what breaks is taken from infer"),
            "share": lower("infer serves less of what is sound"),
            "enter_evidence": lower("a slice is taken from infer on less evidence"),
            "leave_evidence": higher("it comes back on more evidence"),
            "horizon": lower("a fault after a good past is seen on less evidence"),
            "keys": lower("fewer users are enough to take a slice from infer"),
            "dwell": higher("it stays away for longer", time=True),
            "longest_dwell": higher("what breaks again and again stays away for longer", time=True),
            "moves_per_hour": lower("a slice that moves to and fro is left with stable sooner"),
            "most_diverted": higher("more of the traffic may be taken from infer"),
            "stable_in_flight": higher("stable can take more of the traffic", absent=0.0),
            "sample": higher("more of what infer answers is scored again"),
            "sample_near": higher("more is scored where a decision is near"),
            "mirror": higher("more is seen of a slice that was taken from infer"),
            "budget": higher("train may score more"),
            "expires": lower("a route that nobody renews ends sooner", time=True),
            "without_snapshot": ranked(
                "infer", "stable", why="while no route is known, nothing vouches for infer"
            ),
        },
        policy.Promotion: {
            "offline": Part(""),
            "shadow": Part("a stage before all traffic"),
            "canary": Part("a stage before all traffic"),
            "full": Part("what is watched once all traffic is infer's"),
            "valid_for": lower("evidence is renewed sooner", absent=NEVER, time=True),
        },
        policy.StageRule: _STAGE,
    }
)
