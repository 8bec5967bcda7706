# A contract in plain English: each promise, what its answers mean, and what they take; and the
# course of its promotion.  And the names of the language, for someone who has never met them.

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator
from pathlib import PurePath

from servanda.contract.clause import METRIC_ALIASES, Relative, printed_metric
from servanda.contract.fields import duration_text
from servanda.contract.model import Clause, Contract
from servanda.contract.stages import Leg, course_of
from servanda.judgement.clause_kinds import DEFAULT_GUARDS
from servanda.judgement.clauses.base import GUARDS, Cell, Kind
from servanda.judgement.clauses.chain_metrics import CHAIN
from servanda.judgement.lint.sections import RUNTIME_METRICS
from servanda.judgement.plan import Plan
from servanda.judgement.slices.rules import FIELDS, LABEL, field_of
from servanda.report.format import count, exact_percent, wrapped
from servanda.report.table import table
from servanda.theory.divergence.base import DIVERGENCES, Divergence
from servanda.theory.stats.alpha import shared
from servanda.theory.stats.interval import units_expected

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
    fails = (
        "where it fails, the statistical promises are inconclusive, because\n"
        "  their numbers would not be what they claim to be."
    )
    if GUARDS[stored].invalidates is not Kind.invalidates:
        fails = "where it fails, the contract is violated; the promises that do\n"
        fails += "  not rest on it are judged beside it."
    return (
        f"{name}: {of_guard(stored)}.\n"
        f"  a validity check: {fails}  It never makes a contract pass.\n"
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


_WIDTH = 96
_TOKENS = {
    "population": "the tokens that this workload's prompts generate, measured or not",
    "realised": "the tokens that are measured (it says nothing about tomorrow's)",
}
_ANSWERS = (
    "Each promise is judged on each of its slices. Besides what is said below, an answer may be "
    "inconclusive: the data show neither yet. More prompts decide, unless the true value is too "
    "near the limit."
)
_LEGEND = (
    "The tables count {units}. At best: the number that a pass needs if the kernels are "
    "identical. At half the limit: the number if the true value is half of the limit and the "
    "difference comes all or nothing, which is the worst case; one such run in ten needs more."
    "{groups}"
)
_GROUPS = (
    " Where a promise is of tokens, both are for answers as long as max_new_tokens. With answers "
    "half as long it takes twice as many groups at best, and about as many at half the limit "
    "(servanda contract derive expects such answers). claim: realised counts single "
    "tokens instead, and its promise covers the measured ones only."
)
_ROWS = 12  # of slices in one table; the rest is counted


def explain_contract(plan: Plan) -> str:
    """Every clause of a plan: what it promises, what its answers mean, what they take."""
    contract = plan.contract
    blocks = [_head(plan)]
    by_clause: dict[str, list[Cell]] = {}
    for cell in plan.cells:
        by_clause.setdefault(cell.clause.id, []).append(cell)
    blocks += [_clause(plan, cells) for cells in by_clause.values()]
    if any(sized(cell) for cell in plan.cells):
        units = " or ".join(sorted({_unit(cell) for cell in plan.cells if sized(cell)}))
        groups = _GROUPS if "prompt groups" in units else ""
        blocks.append(_fill(_LEGEND.format(units=units, groups=groups)))
    spoken = {clause.id for _, _, clause in contract.clauses()} - by_clause.keys()
    text, table = explain_course(contract)
    if table:
        blocks.append("\n".join([_fill(text), "", *(f"    {line}" for line in table)]))
    if spoken:
        blocks.append(f"No prompt can meet any slice of: {', '.join(sorted(spoken))}.")
    return "\n\n".join(blocks)


def _head(plan: Plan) -> str:
    contract, kernels = plan.contract, plan.contract.kernels
    alpha = exact_percent(plan.alpha)
    share = plan.alpha / (1 - contract.confidence)
    lines = [
        f"{contract.metadata.name}: is {kernels.infer} close enough to {kernels.train}?",
        "Both see the same tokens: the infer kernel generates, the train kernel scores them again.",
        "",
        _fill(
            f"Chance of a wrong answer: at most {alpha} for a pass, and at most {alpha} for a red "
            f"one, shared by {plan.price_cells} pairs of a promise and a slice. This holds however "
            f"often you look while the run goes on. It is {exact_percent(share)} of 1 - confidence "
            f"({contract.confidence:g}): the rest is kept for other attempts."
        ),
    ]
    for schedule in plan.schedules:
        corpus = schedule.corpus
        text = (
            f"The run draws prompts at random from {PurePath(corpus.file).name} "
            f"({len(corpus):,} lines). The first evaluation is after {schedule.first:,} prompt "
            "groups (a group is a prompt, or lines that belong together), and the run stops when "
            f"every cell is decided, at the latest after {schedule.last:,}."
        )
        lines.append(_fill(text))
    return "\n".join([*lines, _fill(_ANSWERS)])


def _clause(plan: Plan, cells: list[Cell]) -> str:
    cell = cells[0]
    clause = cell.clause
    status = {
        True: "enforced" + (", critical" if clause.severity == "critical" else ""),
        False: "shown only, never fails the contract",
    }[clause.enforced]
    lines = [f"{clause.id}  ({cell.section}, {status})", *_indent(promise(cell))]
    if cell.kind.reason:
        what = "Left open (inconclusive)" if cell.kind.applies else "Not judged now"
        return "\n".join([*lines, *_indent(f"{what}: {cell.kind.reason}.")])
    share = f", a share of 1/{plan.price_cells}" if plan.price_cells > 1 else ""
    wrong = f" (wrong: at most {100 * shared(plan.alpha, plan.price_cells):.2g} %{share})"
    answers = cell.kind.answers(clause, (exact_percent(plan.alpha), wrong if cell.priced else ""))
    for answer, text in answers.items():
        lines += _indent(f"{answer:<10}{text}", hang=10)
    if sized(cell):
        lines += ["", *_sizes(plan, cells)]
    else:
        lines += _indent(f"slices    {', '.join(c.cut.name for c in cells)}")
    return "\n".join(lines)


def sized(cell: Cell) -> bool:
    """Whether a number of units can be named before anything runs."""
    return cell.kind.certificate is not None and cell.kind.certificate.feed.proves


def _unit(cell: Cell) -> str:
    return cell.units_of(cell.kind.each)


def promise(cell: Cell) -> str:
    """What a clause promises, as a sentence or two."""
    clause, metric = cell.clause, cell.clause.metric
    if metric in GUARDS:
        return f"Validity check: {of_guard(metric)}."
    meaning = of_metric(metric)
    tokens = _TOKENS[cell.claim]
    unit = DIVERGENCES[metric].unit if metric in DIVERGENCES else ""
    if metric in CHAIN:
        kind, unit = cell.kind, CHAIN[metric].metric_unit
        if kind.phrase:  # and not one that is judged at another stage
            meaning, unit = kind.phrase, kind.metric_unit
        if kind.each == "sequence" or CHAIN[metric].each == "sequence":
            tokens = tokens.replace("tokens", "answers").replace("those", "answers")
        if clause.aggregate is None:
            return f"{_upper(meaning)}: over {tokens}, it {_limit(clause, 'at_most', unit)}."
    if metric in RUNTIME_METRICS:
        unit, which = RUNTIME_METRICS[metric].unit, RUNTIME_METRICS[metric].limit
        how = " on average" if clause.aggregate == "mean" else ""
        if clause.percentile is not None:
            how = f" {clause.percentile:g} % of the requests"
        return f"{_upper(meaning)}:{how} {_limit(clause, which, unit)}."
    if cell.section == "numerical":
        where = "at every position of the golden texts"
        if (clause.aggregate or "max") != "max":
            where = f"over the golden texts ({clause.aggregate})"
        return f"{_upper(meaning)}: {where} {_limit(clause, 'at_most', unit)}."
    if clause.percentile is not None:
        share = f"{round(100 - clause.percentile, 9):g} %"
        beyond = clause.at_most
        above = _relative(beyond) if isinstance(beyond, Relative) else f"{beyond:g} {unit}".rstrip()
        return f"{_upper(meaning)}: at most {share} of {tokens}, may exceed {above}."
    cut = f" Each value counts as at most {clause.clip:g}." if clause.clip is not None else ""
    limit = _limit(clause, "at_most", unit)
    if clause.times_format is not None:
        limit += f", or at most {clause.times_format:g} times what the number format costs"
    return f"{_upper(meaning)}: its mean over {tokens}, {limit}.{cut}"


def _limit(clause: Clause, which: str, unit: str) -> str:
    limit = getattr(clause, which)
    words = {"at_most": "is at most", "at_least": "is at least"}[which]
    value = _relative(limit) if isinstance(limit, Relative) else f"{limit:g} {unit}".rstrip()
    return f"{words} {value}"


def _relative(limit: Relative) -> str:
    of = {
        "stable": "the value of the stable kernel",
        "self_noise": "the noise floor (each kernel against itself in other batches)",
    }[limit.of]
    return f"{limit.times:g} times {of}"


def _sizes(plan: Plan, cells: list[Cell]) -> Iterator[str]:
    """What each slice needs and what the run has for it, and what would decide sooner."""
    unit = _unit(cells[0])
    heads = (f"slice ({unit})", "run offers up to", "needs at best", "at half the limit")
    rows: list[tuple[str, ...]] = [heads]
    short: list[str] = []
    for cell in cells:
        assert cell.kind.certificate
        limit, zero = cell.kind.certificate.feed.limit, cell.kind.certificate.feed.best
        best = cell.kind.units_at_best(plan.alpha)
        half = units_expected(limit, (limit + zero) / 2, plan.alpha, best=zero)
        offered = plan.offered(cell)
        rows.append((cell.cut.name, *map(_count, (offered, best, half))))
        if best is None or half is None:
            short.append("no sample can show 0: write a limit above it")
        elif offered < half:
            short.append(_short(plan, cell.cut.name, offered, best, half))
    for row in table(rows[: _ROWS + 1], right=(1, 2, 3)):
        yield f"    {row}"
    if len(rows) > _ROWS + 1:
        yield f"    and {count(len(rows) - _ROWS - 1, 'more slice')}"
    if not short:
        yield from _indent("sooner: a higher at_most; twice the limit needs half as many", hang=8)
    for line in short[:3]:
        yield from _indent(f"sooner: {line}", hang=8)


def _short(plan: Plan, name: str, offered: int, best: int, half: int) -> str:
    """A slice for which the run is too small, and what would help."""
    what = "cannot hold" if offered < best else "may end undecided if the truth is half the limit"
    help_ = "more prompts of it, or a higher at_most"
    if offered:
        last = plan.contract.promotion.offline.sequences[1]
        sequences = -(-last * half // offered)
        help_ = f"{sequences:,} as the second number of promotion.offline.prompt_groups, {help_}"
    return f"{name} {what}: {help_}"


def _count(n: int | None) -> str:
    return "never" if n is None else f"{n:,}"


def _upper(text: str) -> str:
    return text[:1].upper() + text[1:]


def _fill(text: str) -> str:
    return "\n".join(wrapped(text, _WIDTH))


def _indent(text: str, hang: int = 0) -> list[str]:
    return wrapped(text, _WIDTH, "    ", " " * (4 + hang))


_HEAD = ("step", "infer gets", "prompt groups", "requests, about", "lasts at least", "and then")
_TEXT = (
    "Each step starts without evidence, and ends when every enforced promise holds on it. A "
    "violation on any step returns all traffic to stable. The table has the prompt groups of the "
    "first evaluation and of the limit, and about how many user requests the first evaluation "
    "takes."
)


def explain_course(contract: Contract) -> tuple[str, list[str]]:
    """A paragraph, and the lines of a table; ("", []) where nothing goes live."""
    course = course_of(contract)
    if not any(leg.live for leg in course):
        return "", []
    rows = [_HEAD, *(_row(course, i) for i in range(len(course)))]
    return f"{_TEXT} All {len(course)} steps share the chance of a false rollback.", table(rows)


def _row(course: tuple[Leg, ...], i: int) -> tuple[str, ...]:
    leg = course[i]
    following = course[i + 1] if i + 1 < len(course) else None
    asks = leg.approval and following is not None and following.stage != leg.stage
    undecided = {"wait": "goes on", "hold": "halts", "roll_back": "rolls back"}
    then = [f"undecided: {undecided[leg.if_inconclusive]}"]
    then = ["an approval", *then] if asks else then
    return (
        leg.name,
        leg.traffic,
        f"{leg.first:,} to {leg.last:,}",
        f"{leg.requests:,}" if leg.requests is not None else "",
        duration_text(leg.dwell_s) if leg.dwell_s else "",
        "; ".join(then),
    )
