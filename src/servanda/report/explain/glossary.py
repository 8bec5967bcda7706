# What the names of the language mean, for someone who has never met them.

from __future__ import annotations

import inspect
from collections.abc import Collection

from servanda.contract.clause import METRIC_ALIASES, printed_metric
from servanda.judgement.clause_kinds import DEFAULT_GUARDS
from servanda.judgement.clauses.base import GUARDS
from servanda.judgement.clauses.chain_metrics import CHAIN
from servanda.judgement.lint.sections import RUNTIME_METRICS
from servanda.judgement.slices.rules import FIELDS, LABEL, field_of
from servanda.theory.divergence.base import DIVERGENCES, Divergence

# metric -> what it is of two next-token distributions, in a sentence that needs no formula
_METRICS = {
    "tv": "the share of the probability that the two kernels place on different next tokens "
    "(total variation: 0 is identical, 1 is nothing in common)",
    "router_flip": "the share of a mixture's layers in which the two kernels route a token to "
    "different sets of experts",
    "router_distance": "the share of a token's experts that infer picks and train does not, as a "
    "mean over the layers of a mixture",
    "router_touched": "whether any layer of a mixture routes a token to different sets of experts "
    "(1) or not (0)",
    "gate_drift": "the share of the weight that the routers of the two kernels give to different "
    "experts of a token (total variation of the weights, each layer's as shares of their sum), as "
    "a mean over the layers of a mixture",
    "top1_flip": "whether the top-1 next tokens of the two kernels differ (1) or not (0)",
    "abs_log_ratio_nats": "the distance between the two kernels' logprobs of the sampled "
    "token, up or down (0.1 is about 10 %)",
    "k3_nats": "an estimate of the KL divergence of infer from train, token by token (the k3 "
    "estimator; never negative)",
    "logit_osc_nats": "the spread of the difference of the two kernels' logits over the "
    "vocabulary: its largest less its smallest value",
    "mass_gap": "the difference of the probabilities that the two kernels give to the tokens of a "
    "slice, up or down",
    "tv_contribution": "the contribution of a slice's tokens to the difference of the two kernels",
}
_GUARDS = {
    "sampler_fidelity": "the sampled tokens follow the distribution that the infer kernel reports; "
    "it finds an undisclosed temperature, top-p or mask",
    "served_fidelity": "the sampled tokens follow the distribution that infer's own logprobs "
    "imply, by the ranks that the train kernel gives them; it finds an undisclosed temperature, "
    "top-p or mask where the infer kernel reports only each token's own logprob",
    "usable_ratio": "the share of dispatched tokens for which both kernels gave a valid logprob; "
    "a lost response counts with all the tokens it had room for",
    "kept_ratio": "the share of the sampled tokens that no filter of the trainer removed before "
    "training; a filter that removes disagreeing tokens hides a mismatch",
    "declared_weight_ratio": "the share of the trained tokens whose weight in the loss is the "
    "declared one (`gradient: {weighting: ...}`), within rounding; a dropped token has the weight "
    "0; an exact count of the tokens at hand",
    "loss_kept_ratio": "the share of the trained tokens that the loss did not drop, by its mask or "
    "by a weight of 0; an exact count of the tokens at hand",
    "mean_weight_ratio": "the mean weight that the loss gave to the trained tokens, dropped ones "
    "counting 0; 0.06 means that the batch counts a seventeenth; an exact mean of the tokens at "
    "hand",
    "effective_ratio": "the effective sample size of the loss weights by the number of trained "
    "tokens, (sum of a)² / (n · sum of a²): 1 if all are equal, 0.1 if a tenth of the tokens "
    "would have the same variance; exact for the tokens at hand",
    "rescored_ratio": "the scoring rate: of the requests served in a live step, or in its last "
    "window (`over`), the share that the train kernel scored; too low a rate is inconclusive, and "
    "hides no violation",
    "sample_ratio": "in a canary or in full, infer served the share of the users that the step "
    "plans for it, within the relative difference `at_most` (0.02); a user counts once, by the "
    "first request on the step. It finds a wrong split, and slices or users that do not reach the "
    "infer kernel",
    "coherence": "the importance weights train / infer average at most 1, as those of two "
    "distributions do; it finds raw logprobs on one side and processed ones on the other, and "
    "logprobs of other tokens",
    "self_noise": "each kernel gives the same tokens nearly the same logprobs in other batches "
    "(a low noise floor); dropout left on, or a leak between rows, shows here",
}
_FORMS = {
    "logits": "exactly, from full logits of golden texts (numerical)",
    "logprob": "from the two logprobs of each sampled token (statistical)",
    "top1": "from the top-1 tokens of both kernels (statistical)",
    "routes": "from the experts that both kernels routed a token to (statistical)",
    "gates": "from the experts that both kernels routed a token to, and their weights "
    "(statistical)",
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
    """A validity check as the middle of a sentence."""
    return _GUARDS.get(name) or (inspect.getdoc(GUARDS[name]) or name).split("\n")[0].rstrip(".")


def explain_metric(name: str) -> str | None:
    if name in RUNTIME_METRICS:
        metric = RUNTIME_METRICS[name]
        takes = f"takes {metric.limit}, such as {metric.limit}: {metric.example}"
        takes += "; an aggregate, mean or p50 to p99.9" if metric.aggregate else ""
        takes += "; and the load it is measured under" if metric.load else ""
        unit = f"  unit     {metric.unit}\n" if metric.unit else ""
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
    if metric.sampled_form is None:
        return f"numerical: {{id: x, metric: {metric.name}, aggregate: max, at_most: 0.5}}"
    if metric.bounded:
        return f"statistical: {{id: x, metric: {metric.name}, aggregate: mean, at_most: 0.02}}"
    return (
        f"statistical: {{id: x, metric: {metric.name}, aggregate: p99, at_most: 0.2}}; "
        "its mean has no bound, so it needs clip:"
    )


def explain_guard(name: str) -> str | None:
    stored = METRIC_ALIASES.get(name, name)
    if stored not in GUARDS:
        return None
    printed = printed_metric(stored)
    names = f"  names    {printed}; in verdicts and logs: {stored}\n"
    always = any(guard.metric == stored for guard in DEFAULT_GUARDS)
    return (
        f"{name}: {of_guard(stored)}.\n"
        "  a validity check: where it fails, the statistical promises are inconclusive, because\n"
        "  their numbers would not be what they claim to be.  It never makes a contract pass.\n"
        f"{names if printed != stored else ''}"
        f"  clause   under observability.clauses; it applies "
        f"{'even if it is not written' if always else 'only where it is written'}"
    )


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


def names() -> Collection[str]:
    """Everything that has an explanation of its own."""
    return [
        *DIVERGENCES.names(),
        *CHAIN,
        *RUNTIME_METRICS,
        *map(printed_metric, GUARDS),
        *FIELDS,
        f"{LABEL}<name>",
    ]


def explain_name(name: str) -> str | None:
    """The meaning of a metric, a validity check or a slice field; None for another name."""
    return explain_metric(name) or explain_guard(name) or explain_field(name)
