# Consequences of verdicts: escalation, routing, and the stages of a promotion.

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from servanda.contract.fields import Duration, Number, Value, Whole


class Escalation(Value):
    """A rule: when something is watched to be so, do these actions."""

    when: dict[str, Any] = Field(
        description="{clause: ID, is: violated}, {section: NAME, is_not: holds}, or "
        "{diverted_traffic: {gte: 0.3}}."
    )
    do: tuple[str | dict[str, Any], ...] = Field(
        min_length=1, description="Actions, such as [hold, {page: oncall}]."
    )


class Replica(Value):
    """One server of a pool."""

    url: str = Field(description="Of the server, such as http://10.0.0.7:8000.")
    weight: Number = Field(
        1.0, description="Its share of the pool's requests, relative to the others: above 0."
    )


class Replicas(Value):
    """The servers of the pools that have several; all servers of a pool run the same kernel."""

    infer: tuple[Replica, ...] | None = Field(
        None, description="Of the infer kernel; default its url alone."
    )
    stable: tuple[Replica, ...] | None = Field(
        None, description="Of the stable kernel; default its url alone."
    )


class Routing(Value):
    """How a slice of live traffic leaves the infer kernel, and how it comes back."""

    mode: Literal["observe", "enforce"] = Field(
        "observe",
        description="observe: infer serves all traffic, and decisions are only logged; enforce: "
        "decisions are acted on.",
    )
    share: Number = Field(
        1.0, ge=0, le=1, description="Of the traffic of an active slice that infer serves."
    )
    enter_evidence: Number = Field(1000, gt=1, description="Evidence at which a slice leaves.")
    leave_evidence: Number = Field(20, gt=1, description="Evidence at which it comes back.")
    horizon: Whole = Field(
        10_000,
        ge=1,
        description="Scored requests of a slice in which a false alarm after a good past is as "
        "unlikely as a false leave at all.",
    )
    keys: Whole = Field(
        20,
        ge=1,
        alias="min_users",
        description="Distinct users that the evidence needs before a slice leaves.",
    )
    dwell: Duration = Field(900.0, description="How long it stays away at least.")
    longest_dwell: Duration = Field(
        86_400.0, description="How long at most: each relapse doubles the dwell."
    )
    moves_per_hour: Whole = Field(
        6, ge=1, description="After so many changes of route a slice stays on stable, and a page."
    )
    most_diverted: Number = Field(
        0.3, gt=0, le=1, description="Of all traffic that slices may take to stable by themselves."
    )
    stable_in_flight: Whole | None = Field(
        None,
        ge=1,
        description="Requests that stable can answer at a time; where it is not known, nothing is "
        "diverted.",
    )
    sample: Number = Field(
        0.01, gt=0, le=1, description="Of what infer answers that is re-scored while all is well."
    )
    sample_near: Number = Field(
        0.2, gt=0, le=1, description="The same where a decision is near, at most."
    )
    mirror: Number = Field(
        0.1, gt=0, le=1, description="Of a diverted slice's requests that infer is asked as well."
    )
    budget: Number = Field(
        0.5,
        gt=0,
        alias="scorer_utilisation",
        description="Seconds of the train kernel that re-scoring may take, a second.",
    )
    expires: Duration = Field(
        600.0, gt=0, description="After which a route that no one renews ends."
    )
    without_snapshot: Literal["stable", "infer"] = Field(
        "stable",
        description="Who serves while no route is known; infer where there is no stable kernel.",
    )
    replicas: Replicas = Field(
        Replicas.model_construct(),
        description="Servers that serve the users of a pool, instead of the kernel's url.",
    )


class StageRule(Value):
    """How much evidence a stage needs, in prompt groups: the first evaluation, and the limit."""

    sequences: tuple[Whole, Whole] = Field(
        (200, 4000),
        alias="prompt_groups",
        description="[first evaluation, limit], in prompt groups.",
    )
    share: Number | None = Field(
        None,
        gt=0,
        le=1,
        description="Share of the traffic that is mirrored (shadow); default 0.05.",
    )
    sample: Number | None = Field(
        None,
        gt=0,
        le=1,
        description="Share of the served requests that are scored; default 0.01 in full, else all, "
        "up to the limit.",
    )
    steps: tuple[Number, ...] | None = Field(
        None,
        description="Shares of the traffic that infer serves, one after another (canary); default "
        "[0.05].",
    )
    dwell: Duration | None = Field(None, description="Minimum hold time of each step.")
    approval: Literal["required", "none"] = Field(
        "none", description="required: the next stage needs an approval."
    )
    if_inconclusive: Literal["wait", "hold", "roll_back"] = Field(
        "hold",
        description="What happens when the limit is reached undecided; wait gathers beyond it.",
    )


class Promotion(Value):
    """The stages of a promotion; one that is absent does not exist."""

    offline: StageRule = StageRule.model_construct()
    shadow: StageRule | None = None
    canary: StageRule | None = None
    full: StageRule | None = None
    valid_for: Duration | None = Field(None, description="Age at which the evidence expires.")

    def has(self, stage: str) -> bool:
        return getattr(self, stage, None) is not None
