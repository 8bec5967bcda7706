# A contract test as frozen values: data, and the expected verdicts of a contract.

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PrivateAttr, WithJsonSchema

from servanda.authoring.contract_test.series import SeriesText
from servanda.contract.clause import Stage
from servanda.contract.fields import Duration, Flag, Number, Value, Whole
from servanda.contract.model import API_VERSION, WHOLE, Metadata, Place
from servanda.errors import Where
from servanda.promotion.state import Status

KIND = "ContractTest"
REST = "rest"  # the tokens that no slice above it has
SUFFIX = ".kerneltest.yaml"

Answer = Literal["holds", "violated", "inconclusive", "error"]
CellAnswer = Literal["holds", "violated", "inconclusive", "error", "not applicable"]


_SERIES = {"type": "string", "minLength": 1}
Traffic = Annotated[
    dict[str, SeriesText],
    BeforeValidator(lambda value: value if isinstance(value, Mapping) else {WHOLE: value}),
    WithJsonSchema({"anyOf": [_SERIES, {"type": "object", "additionalProperties": _SERIES}]}),
]


class Level(Value):
    """A service level under both kernels, where the clause is relative to stable."""

    infer: Number = Field(gt=0)
    stable: Number = Field(gt=0)


class Clock(Value):
    """Virtual time: a promotion is evaluated repeatedly, as prompt groups arrive."""

    every: Duration = Field(gt=0, description="Between two looks; the first is at 0s.")
    groups: Whole = Field(ge=1, description="Prompt groups that come in between two looks.")

    def looks(self, at: float) -> int:
        """Looks after the first one, up to a time."""
        return math.floor(at / self.every + 1e-9)


class Act(Value):
    """An action of a person on the promotion, before the evaluation at that time."""

    at: Duration
    approve: str | None = Field(None, min_length=1, description="Who says yes.")
    roll_back: str | None = Field(None, min_length=1, description="Who rolls back.")
    override: str | None = Field(None, description='A cell, "tail on domain=code", or a clause.')
    ttl: Duration = Field(86400.0, gt=0, description="After which an override expires.")
    fails: str | None = Field(None, min_length=1, description="Why measuring fails at this look.")
    changes: Literal["weights", "train", "infer", "stable"] | None = Field(
        None, description="Which kernel, or the weights, are others from now on."
    )


class Expectation(Value):
    """The expected verdict at one evaluation."""

    after: Whole | None = Field(
        None, ge=0, description="Prompt groups of the look; default the end of the series."
    )
    at: Duration | None = Field(None, description="With a clock: the time of the look.")
    leg: str | None = Field(None, description="offline, shadow, canary-1, canary-2, full-1.")
    stage: Stage | None = None
    status: Status | None = Field(None, description="Where the promotion stands.")
    share: Number | None = Field(
        None, ge=0, le=1, description="Of the traffic that infer serves then."
    )
    paged: tuple[str, ...] | None = Field(None, description="Who was paged until then, in order.")
    verdict: Answer | None = None
    cells: dict[str, CellAnswer] = Field(
        default_factory=dict,
        description='{"tail on domain=code": violated}; a clause alone is the worst of its cells.',
    )
    actions: tuple[str | dict[str, Any], ...] | None = Field(
        None, description="What the escalation asks for, all of it: [{divert: slice}, hold]."
    )
    can_promote: Flag | None = Field(None, description="Whether the stage may be left.")


class Case(Value):
    """Data of one kind, and what the contract answers to it."""

    name: str = Field(min_length=1, description="What it shows, in words.")
    traffic: Traffic | None = Field(
        None, description="Log ratios in nats: one series, or one for each slice and rest."
    )
    self_noise: Traffic | None = Field(
        None, description="As traffic: each kernel against itself, in other batches."
    )
    stable: Traffic | None = Field(None, description="As traffic: the stable kernel.")
    golden: dict[str, Number] | None = Field(
        None, description="{logit_osc_nats: 0.4}: the metric at every golden position."
    )
    timing: dict[str, Number | Level] | None = Field(
        None, description="{CLAUSE: 0.2}: what every request shows, in the clause's unit."
    )
    rescored: Number | None = Field(
        None, ge=0, le=1, description="Of the requests that infer serves, what train scores again."
    )
    sample_ratio: Number | None = Field(
        None, ge=0, description="The share of the users that infer serves over the planned one."
    )
    temperature: Number | None = Field(
        None, gt=0, le=10, description="At which tokens are drawn, where it is not the reported."
    )
    clock: Clock | None = Field(
        None, description="Promotes the build: {every: 1m, groups: 200}; traffic goes on with time."
    )
    acts: tuple[Act, ...] = Field((), description="[{at: 20m, approve: alice}], with a clock.")
    expect: tuple[Expectation, ...] = Field(min_length=1)


class ContractTest(Value):
    """A contract, and cases that it has to answer right."""

    apiVersion: Literal[API_VERSION]  # type: ignore[valid-type]
    kind: Literal["ContractTest"]
    metadata: Metadata
    contract: str = Field(description="Its file, from this file's folder.")
    seed: Whole = Field(0, ge=0, description="Of everything that is drawn.")
    answer_tokens: Whole | None = Field(
        None, ge=1, description="Of each answer; default as many as the workload has room for."
    )
    golden: dict[str, Number] | None = Field(None, description="Of cases that give none.")
    timing: dict[str, Number | Level] | None = Field(None, description="Of cases that give none.")
    cases: tuple[Case, ...] = Field(min_length=1)

    # places of the parts in the text, if the test was read from one
    _near: Callable[[Place], Where] | None = PrivateAttr(None)

    def placed(self, near: Callable[[Place], Where]) -> ContractTest:
        """The same test, which knows its text."""
        test = self.model_copy()
        test._near = near
        return test

    def where(self, *place: str | int) -> Where | None:
        """The place of a part, such as ("cases", 0, "expect", 1), or of its parent."""
        return self._near(place) if self._near else None
