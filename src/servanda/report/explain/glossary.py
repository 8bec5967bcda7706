# What the names of the language mean, for someone who has never met them.

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection

from servanda.judgement.clause_kinds import DEFAULT_GUARDS
from servanda.judgement.clauses.base import GUARDS
from servanda.judgement.clauses.chain_metrics import CHAIN
from servanda.judgement.lint.runtime import RUNTIME_METRICS
from servanda.judgement.slices.rules import FIELDS, LABEL, field_of
from servanda.theory.divergence.base import DIVERGENCES, Divergence

# metric -> what it is of two next-token distributions, in a sentence that needs no formula
_METRICS = {
    "tv": "the share of the probability that the two kernels place on different next tokens "
    "(total variation: 0 is identical, 1 is nothing in common)",
    "top1_flip": "whether the two kernels disagree on the likeliest next token (1) or not (0)",
    "abs_log_ratio_nats": "how far apart the two kernels' logprobs of the drawn token are, up or "
    "down (0.1 is about 10 %)",
    "k3_nats": "an estimate of the KL divergence of infer from train, token by token (the k3 "
    "estimator; never negative)",
    "logit_osc_nats": "the spread of the difference of the two kernels' logits over the "
    "vocabulary: its largest less its smallest value",
    "mass_gap": "how much more, or less, probability infer gives to the tokens of a slice than "
    "train does",
    "tv_contribution": "how much the tokens of a slice add to the difference of the two kernels",
}
_GUARDS = {
    "sampler_fidelity": "the served tokens follow the distribution that infer reports; it finds "
    "an undisclosed temperature, top-p or mask",
    "served_fidelity": "the served tokens follow the distribution that infer's logprobs speak of, "
    "as train ranks them; it finds an undisclosed temperature, top-p or mask where infer reports "
    "no more than each token's own logprob",
    "usable_ratio": "the share of launched tokens for which both kernels gave a usable logprob; "
    "a lost answer counts with all the tokens it had room for",
    "kept_ratio": "the share of the drawn tokens that no filter of the trainer removed before "
    "training; a filter that removes what disagrees hides a mismatch",
    "rescored_ratio": "the share of the requests served on a live leg, or in its last stretch "
    "(`over`), that train scored again; too few is inconclusive, and hides no violation",
    "coherence": "the two kernels' logprobs can be those of two distributions; it finds raw "
    "logprobs on one side beside processed ones on the other, and logprobs of other tokens",
    "self_noise": "each kernel agrees with itself when the same tokens are scored in other "
    "batches; dropout left on or a leak between rows shows here",
}
_FORMS = {
    "logits": "exactly, from full logits of golden texts (numerical)",
    "logprob": "from the two logprobs of each sampled token (statistical)",
    "top1": "from both kernels' likeliest tokens (statistical)",
}
_WHEN = {
    "request": "before the request, so traffic can be routed by it",
    "context": "before each token is drawn; it can be judged, and no request routed by it",
    "outcome": "only after the token is drawn; only mass_gap and tv_contribution can be judged "
    "on such slices",
}


def of_metric(name: str) -> str:
    """A metric as the middle of a sentence."""
    if name in _METRICS:
        return _METRICS[name]
    if name in RUNTIME_METRICS:
        return RUNTIME_METRICS[name].meaning
    if name in CHAIN:
        return CHAIN[name].meaning
    if name in DIVERGENCES:
        form = next(iter(DIVERGENCES[name].forms.values()))
        return (inspect.getdoc(form) or name).split("\n")[0].rstrip(".")
    return name


def of_guard(name: str) -> str:
    """A guard as the middle of a sentence."""
    return _GUARDS.get(name) or (inspect.getdoc(GUARDS[name]) or name).split("\n")[0].rstrip(".")


def explain_metric(name: str) -> str | None:
    if name in RUNTIME_METRICS:
        metric = RUNTIME_METRICS[name]
        takes = f"takes {metric.limit}, such as {metric.limit}: {metric.example}"
        takes += "; an aggregate, mean or p50 to p99.9" if metric.aggregate else ""
        takes += "; and the load it is measured under" if metric.load else ""
        unit = f"  unit     {metric.unit}\n"
        return f"{name}: {metric.meaning}.\n{unit}  clause   under runtime.clauses; {takes}"
    if name in CHAIN:
        return f"{name}: {CHAIN[name].meaning}.\n  promise  statistical: {CHAIN[name].example}"
    if name not in DIVERGENCES:
        return None
    metric = DIVERGENCES[name]
    lines = [f"{name}: {of_metric(name)}."]
    low, high = metric.span
    end = f"{high:g}" if metric.bounded else "no upper end"
    lines.append(f"  values   {low:g} to {end}{f', in {metric.unit}s' if metric.unit else ''}")
    lines += [f"  known    {_FORMS.get(form, form)}" for form in metric.forms]
    lines.append(f"  promise  {_promise(metric)}")
    sources = dict.fromkeys(metric.sources.values())
    return "\n".join([*lines, f"  source   {'; '.join(sources)}"])


def _promise(metric: Divergence) -> str:
    if not {"logprob", "top1"} & set(metric.forms):
        return f"numerical: {{id: x, metric: {metric.name}, aggregate: max, at_most: 0.5}}"
    if metric.bounded:
        return f"statistical: {{id: x, metric: {metric.name}, aggregate: mean, at_most: 0.02}}"
    return (
        f"statistical: {{id: x, metric: {metric.name}, aggregate: p99, at_most: 0.2}}; "
        "its mean has no bound, so it needs clip:"
    )


def explain_guard(name: str) -> str | None:
    if name not in GUARDS:
        return None
    return (
        f"{name}: {of_guard(name)}.\n"
        "  a validity check: if it fails, the statistical promises are inconclusive, because\n"
        "  their numbers would not have the meaning that they claim.  It never makes a pass.\n"
        f"  clause   under observability.clauses; {_written(name)}"
    )


def _written(name: str) -> str:
    if any(guard.metric == name for guard in DEFAULT_GUARDS):
        return "it is there even if it is not written"
    return "it is judged only where it is written"


def explain_field(name: str) -> str | None:
    field = field_of(name)
    if field is None:
        return None
    lines = [f"{name}: {field.meaning}.", f"  known    {_WHEN[field.known]}"]
    if field.values:
        lines.append(f"  values   {', '.join(field.values)}")
    lines.append(f"  slice    {{name: x, {_example(name, field.values)}}}")
    return "\n".join(lines)


def _example(name: str, values: tuple[str, ...] | None) -> str:
    if values is None:
        return f"split: {name}, at: [8, 16]}} or {{name: x, match: {{{name}: {{gte: 8}}}}"
    value = values[0] if values else "math"
    return f"split: {name}}} or {{name: x, match: {{{name}: {{in: [{value}]}}}}"


# each says what a name means, or None where it is none of its own
EXPLAINERS: list[Callable[[str], str | None]] = [explain_metric, explain_guard, explain_field]


def names() -> Collection[str]:
    """Everything that has an explanation of its own."""
    return [*DIVERGENCES, *CHAIN, *RUNTIME_METRICS, *GUARDS, *FIELDS, f"{LABEL}<name>"]


def explain_name(name: str) -> str | None:
    """What a metric, a guard or a slice field means; None where nothing is named so."""
    return next((text for explain in EXPLAINERS if (text := explain(name)) is not None), None)
