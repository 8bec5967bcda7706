# The data of a comparison: workloads, golden texts, and labels of live traffic.

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag, model_serializer

from servanda.contract.clause import form
from servanda.contract.fields import Name, Value, Whole
from servanda.theory.sampling import Sampling

Path = Literal["prefill", "decode"]


class WorkloadSampling(Sampling):
    """The declared sampling of a workload: a transform, a budget and a seed."""

    model_config = ConfigDict(strict=True)

    max_new_tokens: Whole = Field(64, ge=1, le=1_000_000)
    seed: Whole = Field(0, ge=0)

    @property
    def transform(self) -> Sampling:
        return Sampling(**self.model_dump(include=set(Sampling.model_fields)))


class Workload(Value):
    """The prompts that the kernels are compared on, and how answers are drawn."""

    source: Literal["prompts", "trainer"] = Field(
        "prompts", description="trainer: the tokens come from a trainer as it runs."
    )
    prompts: str = Field("", description="A file of JSON lines, from the contract's folder.")
    mode: Literal["rollout", "score"] = "rollout"
    samples: Whole = Field(1, ge=1, le=4096, description="Draws of each prompt.")
    sampling: WorkloadSampling = WorkloadSampling.model_construct()
    round: Whole = Field(
        64, ge=1, le=65536, description="Prompt groups that open and close together."
    )


class NamedWorkload(Workload):
    """One of several workloads, as an item of a list."""

    name: Name

    @property
    def unnamed(self) -> Workload:
        return Workload(**{name: getattr(self, name) for name in Workload.model_fields})


class Golden(Value):
    """Fixed texts that both kernels score with their full vocabulary."""

    prompts: str = Field(description="A file of JSON lines, from the contract's folder.")
    path: Path = Field("decode", description="How infer scores them; train prefills.")


class LabelSource(Value):
    """Where live traffic has a label: api_key, route, or request.metadata.<key>."""

    model_config = ConfigDict(populate_by_name=False)

    source: str = Field(alias="from", description="api_key, route, or request.metadata.<key>.")

    @model_serializer
    def _as_written(self) -> dict[str, str]:
        return {"from": self.source}


Workloads = Annotated[
    Annotated[dict[Name, Workload], Field(min_length=1), Tag("(mapping)")]
    | Annotated[tuple[NamedWorkload, ...], Field(min_length=1), Tag("(scalar)")],
    Discriminator(form),
]
