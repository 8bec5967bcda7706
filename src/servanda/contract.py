# The contract: what the YAML means, as frozen values.
#
# Only shapes and ranges of single fields are checked here; what one field says about
# another is checked by lint, and language.py finds the place of either in the text.

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import PurePath
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    PrivateAttr,
    Tag,
)

from servanda.errors import Where
from servanda.fields import Duration, Flag, Name, Number, Range, Value, Whole
from servanda.sampling import Sampling

API_VERSION = "servanda.dev/v1alpha1"
SECTIONS = ("numerical", "statistical", "runtime", "observability")
STAGES = ("offline", "shadow", "canary", "full")
QUANTIZATIONS = ("int8_weight_only", "int8_dynamic", "w8a8", "int4_g32")
RECORDS = ("fingerprint", "token_ids", "processed_logprobs", "sampling", "path", "batch_size")
WHOLE = "all"  # the slice that every clause also has

Section = Literal["numerical", "statistical", "runtime", "observability"]
Stage = Literal["offline", "shadow", "canary", "full"]
Path = Literal["prefill", "decode"]
Claim = Literal["population", "realised"]
Place = tuple[str | int, ...]  # of a part of a contract: keys and indexes
Severity = Literal["warning", "error", "critical"]

_AGGREGATE = re.compile(r"mean|max|p([0-9]{1,2}(?:\.[0-9]+)?)")


def _aggregate(text: str) -> str:
    match = _AGGREGATE.fullmatch(text)
    if not match or (match[1] and not 0 < float(match[1]) < 100):
        raise ValueError("an aggregate is mean, max, or a percentile such as p99 or p99.9")
    return text


def _name_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


class Metadata(Value):
    name: Name
    version: str = "0.0.0"
    title: str = ""
    description: str = ""
    annotations: dict[str, Any] = Field(default_factory=dict)


class Kernel(Value):
    """A program that evaluates the policy: engine, precision, sampling, and how it runs."""

    engine: str
    model: str | None = None
    title: str = ""
    dtype: Literal["float64", "float32", "bfloat16", "float16"] = "float32"
    attention: Literal["eager", "sdpa"] = "eager"
    quantization: str | None = None
    path: Path | None = None
    batch_size: Whole = Field(32, ge=1, le=4096)
    sampling: Sampling | None = None
    weights_from: str | None = None
    fault: dict[str, Any] | None = None  # one fault of the catalogue, injected on purpose

    def __str__(self) -> str:
        parts = [self.dtype, self.attention, self.quantization or ""]
        text = " ".join(p for p in parts if p) if self.engine not in ("table", "pack") else ""
        name = self.title or f"{self.engine} {PurePath(self.model or '').name} {text}".strip()
        return f"{name} [fault: {', '.join(self.fault)}]" if self.fault else name


class Kernels(Value):
    train: Kernel
    infer: Kernel


class WorkloadSampling(Sampling):
    """The declared sampling of a workload: a transform, a budget and a seed."""

    model_config = ConfigDict(strict=True)

    max_new_tokens: Whole = Field(64, ge=1, le=1_000_000)
    seed: Whole = Field(0, ge=0)

    @property
    def transform(self) -> Sampling:
        return Sampling(**self.model_dump(include=set(Sampling.model_fields)))


class Workload(Value):
    prompts: str
    mode: Literal["rollout", "score"] = "rollout"
    samples: Whole = Field(1, ge=1, le=4096)  # draws of each prompt
    sampling: WorkloadSampling = WorkloadSampling()  # type: ignore[call-arg]
    round: Whole = Field(64, ge=1, le=65536)  # prompt groups that open and close together


class Golden(Value):
    prompts: str
    path: Path = "decode"  # how the infer kernel scores the fixed tokens; train prefills


class SliceRule(Value):
    """A declared slice: `split` makes one cell a value or bucket, `match` makes one cell."""

    name: Name
    split: str | None = None
    match: dict[str, dict[str, Any]] | None = None
    at: tuple[Number, ...] | None = None
    most: Whole = Field(8, ge=1, le=1000)


class Relative(Value):
    """A limit that is a multiple of something measured."""

    times: Number = Field(gt=0)
    of: Literal["stable", "self_noise"]


def _limit_form(value: object) -> str:
    return "relative" if isinstance(value, Mapping | Relative) else "number"


Limit = Annotated[
    Annotated[Number, Tag("number")] | Annotated[Relative, Tag("relative")],
    Discriminator(_limit_form),
]


class Clause(Value):
    """One promise: an aggregate of a metric stays within a limit on each of its slices."""

    id: Name
    metric: str
    aggregate: Annotated[str, AfterValidator(_aggregate)] | None = None
    at_most: Limit | None = None
    at_least: Limit | None = None
    clip: Number | None = Field(None, gt=0)
    severity: Severity = "error"
    mode: Literal["enforce", "monitor"] = "enforce"
    slices: Annotated[tuple[str, ...], BeforeValidator(_name_list)] | None = None  # None: every
    stages: tuple[Stage, ...] = STAGES
    claim: Claim | None = None
    workload: Name | None = None  # where there are several; None: the first
    required: Flag = False
    load: dict[str, Any] | None = None
    over: Duration | None = None

    @property
    def enforced(self) -> bool:
        return self.mode == "enforce" and self.severity != "warning"

    @property
    def percentile(self) -> float | None:
        """99.0 for p99, None for mean and max."""
        match = _AGGREGATE.fullmatch(self.aggregate or "")
        return float(match[1]) if match and match[1] else None


class Envelope(Value):
    batch_size: Range | None = None
    prompt_tokens: Range | None = None
    path: Path | None = None
    outside: str = "stable"


class Runtime(Value):
    envelope: Envelope | None = None
    clauses: tuple[Clause, ...] = ()


class Observability(Value):
    record: tuple[Literal[RECORDS], ...] = ()  # type: ignore[valid-type]
    clauses: tuple[Clause, ...] = ()


class Escalation(Value):
    when: dict[str, Any]
    do: tuple[str | dict[str, Any], ...] = Field(min_length=1)


class Routing(Value):
    enter_evidence: Number = Field(1000, gt=1)
    leave_evidence: Number = Field(20, gt=1)
    dwell: Duration = 900.0
    without_snapshot: Literal["stable", "infer"] = "stable"


class StageRule(Value):
    """How much evidence a stage needs, in prompt groups: the first look, and the limit."""

    sequences: tuple[Whole, Whole] = (200, 4000)
    share: Number | None = Field(default=None, gt=0, le=1)
    sample: Number | None = Field(default=None, gt=0, le=1)
    steps: tuple[Number, ...] | None = None
    dwell: Duration | None = None
    approval: Literal["required", "none"] = "none"
    if_inconclusive: Literal["wait", "hold", "roll_back"] = "hold"


class Promotion(Value):
    offline: StageRule = StageRule()
    shadow: StageRule | None = None
    canary: StageRule | None = None
    full: StageRule | None = None
    valid_for: Duration | None = None


class Reward(Value):
    range: Range = (0.0, 1.0)


class Gradient(Value):
    advantage: dict[str, Any] | Number | None = None
    score_norm: str | Number | None = None
    weighting: str | dict[str, Any] | None = None


class Contract(Value):
    """What the two kernels promise each other (arXiv 2606.07581: C = (N, S, R, O, Pi))."""

    apiVersion: Literal[API_VERSION]  # type: ignore[valid-type]
    kind: Literal["KernelContract"]
    metadata: Metadata
    kernels: Kernels
    stable: Kernel | None = None
    workload: Workload | None = None
    golden: Golden | None = None
    slices: tuple[SliceRule, ...] = ()
    confidence: Number = Field(0.95, gt=0.5, lt=1)
    claim: Claim = "population"
    reward: Reward | None = None
    gradient: Gradient | None = None
    numerical: tuple[Clause, ...] = ()
    statistical: tuple[Clause, ...] = ()
    runtime: Runtime = Runtime()
    observability: Observability = Observability()
    escalation: tuple[Escalation, ...] = ()
    routing: Routing | None = None
    promotion: Promotion = Promotion()

    # where each part stands in the text that the contract was read from, if it was
    _near: Callable[[Place], Where] | None = PrivateAttr(None)

    def placed(self, near: Callable[[Place], Where]) -> Contract:
        """The same contract, which knows its text."""
        contract = self.model_copy()
        contract._near = near
        return contract

    def where(self, *place: str | int) -> Where | None:
        """Where a part stands, such as ("statistical", 0, "at_most"), or what holds it."""
        return self._near(place) if self._near else None

    def __eq__(self, other: object) -> bool:
        """Where a contract was read from does not make it another one."""
        return isinstance(other, Contract) and self.model_dump() == other.model_dump()

    def __hash__(self) -> int:
        return hash(self.digest)

    def clauses(self) -> Iterator[tuple[Section, Place, Clause]]:
        """(section, place in the contract, clause), in the order of the four families."""
        families: tuple[tuple[Section, tuple[Clause, ...]], ...] = (
            ("numerical", self.numerical),
            ("statistical", self.statistical),
            ("runtime", self.runtime.clauses),
            ("observability", self.observability.clauses),
        )
        for section, clauses in families:
            for i, clause in enumerate(clauses):
                nested = section in ("runtime", "observability")
                yield section, (section, *(["clauses"] if nested else []), i), clause

    @property
    def all_workloads(self) -> dict[str, Workload]:
        """Every workload under its name, the first one first."""
        return {"workload": self.workload} if self.workload else {}

    @property
    def meaning(self) -> dict[str, Any]:
        """What evidence is for: without names for people and where files lie.

        What lies in those files counts by itself: evidence is keyed by the digests of
        weights, vocabulary and prompts besides that of the contract.
        """
        return self.model_dump(mode="json", exclude=_NOT_MEANING)

    @property
    def digest(self) -> str:
        """Of the meaning; comments and the order of keys do not count."""
        text = json.dumps(self.meaning, sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


_KERNEL = {"model", "title"}
_NOT_MEANING: dict[str, Any] = {
    "metadata": {"annotations", "title", "description", "version"},
    "kernels": {"train": _KERNEL, "infer": _KERNEL},
    "stable": _KERNEL,
    "workload": {"prompts"},
    "golden": {"prompts"},
    # evidence is valid at every look: how much to gather and what to do with it may change
    "promotion": True,
    "routing": True,
    "escalation": True,
}
