# A clause: one promise about two kernels, its limit, and the slices of tokens to which it applies.

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from servanda.contract.fields import Duration, Flag, Name, Number, Value, Whole

SECTIONS = ("numerical", "statistical", "runtime", "observability", "trend")
STAGES = ("offline", "shadow", "canary", "full")
WHOLE = "all"  # the slice that every clause also has

# the next move of a trend without a reference
CALIBRATE_TREND = (
    "servanda contract calibrate good-*.jsonl --recorded N --save-reference good.reference.json"
    "   (the states of a monitor, or dumps, of all N healthy runs)"
)

Section = Literal["numerical", "statistical", "runtime", "observability", "trend"]
Place = tuple[str | int, ...]  # of a part of a contract: keys and indexes
Stage = Literal["offline", "shadow", "canary", "full"]
Claim = Literal["population", "realised"]
Severity = Literal["warning", "error", "critical"]

TEXT = "text"  # see _stored_metric
# a metric's name in contracts -> the name that evidence, digests and verdicts have
METRIC_ALIASES: Mapping[str, str] = {
    "scoring_rate": "rescored_ratio",
    "valid_ratio": "usable_ratio",
    "weight_mean_check": "coherence",
}
_PRINTED = {stored: name for name, stored in METRIC_ALIASES.items()}

SAMPLE_RATIO = "sample_ratio"
# at_most of a clause that writes no limit: a few requests always fail over to stable
IMPLIED_LIMITS: Mapping[str, float] = {SAMPLE_RATIO: 0.02}

_AGGREGATE = re.compile(r"mean|max|p([0-9]{1,2}(?:\.[0-9]+)?)")


def _aggregate(text: str) -> str:
    match = _AGGREGATE.fullmatch(text)
    if not match or (match[1] and not 0 < float(match[1]) < 100):
        raise ValueError("an aggregate is mean, max, or a percentile such as p99 or p99.9")
    return text


def _stored_metric(name: object, info: ValidationInfo) -> object:
    """The name under which a metric is registered and stored; the text of a contract has another.

    A text is validated in the context `TEXT`, and plain data without one.
    """
    if not isinstance(name, str):
        return name
    if name in _PRINTED and info.context == TEXT:
        about = {"name": name, "at": 0, "hint": f"did you mean {_PRINTED[name]!r}?"}
        raise PydanticCustomError("metric", "no metric is named '{name}'", about)
    return METRIC_ALIASES.get(name, name)


def printed_metric(name: str) -> str:
    """The name that messages and pages give a metric.

    >>> printed_metric("coherence"), printed_metric("tv")
    ('weight_mean_check', 'tv')
    """
    return _PRINTED.get(name, name)


def _name_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


def form(value: object) -> str:
    """The branch of "a scalar, or a mapping" for a value; no key has these names."""
    return "(mapping)" if isinstance(value, Mapping | Value) else "(scalar)"


class Relative(Value):
    """A limit that is a multiple of something measured."""

    times: Number = Field(gt=0, description="How many times what is measured.")
    of: Literal["stable", "self_noise"] = Field(
        description="stable: the value of the stable kernel; self_noise: the noise floor, each "
        "kernel against itself in other batches."
    )


Limit = Annotated[
    Annotated[Number, Tag("(scalar)")] | Annotated[Relative, Tag("(mapping)")],
    Discriminator(form),
]
Aggregate = Annotated[
    str,
    AfterValidator(_aggregate),
    WithJsonSchema({"type": "string", "pattern": r"^(mean|max|p[0-9]{1,2}(\.[0-9]+)?)$"}),
]
Names = Annotated[
    tuple[str, ...],
    BeforeValidator(_name_list),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}),
]


class Load(Value):
    """The load under which a service level is measured."""

    concurrency: Whole = Field(ge=1, le=4096, description="Requests in flight at once.")
    new_tokens: Whole | None = Field(
        None, ge=1, le=1_000_000, description="Tokens each answers with; default the workload's."
    )
    prompt_tokens: Whole | None = Field(
        None, ge=1, le=10_000_000, description="Tokens of each prompt; default as they are."
    )


class Clause(Value):
    """One promise: an aggregate of a metric stays within a limit on each of its slices."""

    id: Name = Field(description="The clause's own name; evidence is kept by it.")
    metric: Annotated[str, BeforeValidator(_stored_metric)] = Field(
        description="The measured quantity; `servanda contract explain METRIC` says more."
    )
    aggregate: Aggregate | None = Field(
        None, description="mean, max (numerical), or a percentile such as p99."
    )
    at_most: Limit | None = Field(
        None, description="A number, or {times: 3, of: self_noise} or {times: 1.1, of: stable}."
    )
    times_format: Number | None = Field(
        None,
        ge=1,
        description="For the mean of tv: or at most so many times what the number format of the "
        "kernels costs, which train in that format shows on the same tokens.",
    )
    at_least: Limit | None = Field(
        None, description="As at_most, for a value that is to stay large."
    )
    clip: Number | None = Field(
        None,
        gt=0,
        description="Caps each value, so that the mean of an unbounded metric is bounded.",
    )
    severity: Severity = Field("error", description="warning: shown, and never enforced.")
    mode: Literal["enforce", "monitor"] = Field(
        "enforce", description="monitor: shown, and never enforced."
    )
    slices: Names | None = Field(
        None, description="Names of slices; default every one on which the metric is defined."
    )
    workload: Name | None = Field(None, description="One of workloads; default the first.")
    stages: tuple[Stage, ...] = Field(STAGES, description="Stages at which it is judged.")
    claim: Claim | None = Field(None, description="population or realised; default the contract's.")
    required: Flag = Field(
        False, description="An engine that cannot give what is needed is an error."
    )
    load: Load | None = Field(None, description="For times and speeds: the load they hold under.")
    over: Duration | None = Field(None, description="The window of live traffic that it covers.")

    @model_validator(mode="before")
    @classmethod
    def _implied(cls, data: Any) -> Any:
        """The limit of a clause that has a default: part of its digest and of its changes."""
        if not isinstance(data, Mapping) or data.get("metric") not in tuple(IMPLIED_LIMITS):
            return data
        said = any(data.get(name) is not None for name in ("at_most", "at_least"))
        return data if said else {**data, "at_most": IMPLIED_LIMITS[data["metric"]]}

    @property
    def enforced(self) -> bool:
        return self.mode == "enforce" and self.severity != "warning"

    @property
    def percentile(self) -> float | None:
        """99.0 for p99, None for mean and max."""
        match = _AGGREGATE.fullmatch(self.aggregate or "")
        return float(match[1]) if match and match[1] else None


class Trend(Value):
    """Whether the gap of a trainer's steps has changed against runs that were good."""

    reference: str = Field(
        "",
        description="A file that `servanda contract calibrate GOOD_RUN --save-reference FILE` "
        "writes, from the contract's folder.",
    )
    digest: str | None = Field(None, description="Of the reference; another one is refused.")
    metrics: Names = Field((), description="What is followed; default all that the reference has.")
    severity: Severity = Field(
        "error", description="warning: shown, and never enforced; else nine good runs are needed."
    )
    mode: Literal["enforce", "monitor"] = Field(
        "enforce", description="monitor: shown, and never enforced."
    )

    @property
    def enforced(self) -> bool:
        return self.mode == "enforce" and self.severity != "warning"


class SliceRule(Value):
    """A declared slice: `split` makes one cell a value or bucket, `match` makes one cell."""

    name: Name
    split: str | None = Field(None, description="A field; each value or bucket is a slice.")
    match: dict[str, dict[str, Any]] | None = Field(
        None, description="{field: {gte: 3.0}} or {labels.x: {in: [a, b]}}; all must be met."
    )
    at: tuple[Number, ...] | None = Field(None, description="The edges of the buckets.")
    most: Whole = Field(8, ge=1, le=1000, description="Values that get a slice of their own.")
