# The contract as frozen values.
#
# Only shapes and ranges of single fields are checked here; lint checks fields against each other,
# and parser.py finds their places in the text.  Promises are in clause.py, consequences of verdicts
# in policy.py, a trainer's declarations in objective.py.

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import PurePath
from typing import Any, Literal

from pydantic import Field, PrivateAttr

from servanda.contract.clause import WHOLE, Claim, Clause, Place, Section, SliceRule, Trend
from servanda.contract.fields import Device, Name, Number, Range, Value, Whole
from servanda.contract.identity import digest_of
from servanda.contract.objective import Gradient, Reward
from servanda.contract.policy import Escalation, Promotion, Routing
from servanda.contract.speculation import brief, moved_options
from servanda.contract.workload import Golden, LabelSource, Path, Workload, Workloads
from servanda.errors import Where
from servanda.theory.sampling import Sampling

__all__ = [
    "API_VERSION",
    "BEST_ONLY",
    "EXTERNAL",
    "PACK",
    "RECORDS",
    "WHOLE",
    "Clause",
    "Contract",
    "Envelope",
    "Kernel",
    "Kernels",
    "Metadata",
    "Observability",
    "Path",
    "Place",
    "Runtime",
    "Weights",
]

API_VERSION = "servanda.dev/v1alpha1"
RECORDS = ("fingerprint", "token_ids", "processed_logprobs", "sampling", "path", "batch_size")
PACK = "pack"  # the engine of a kernel that drew elsewhere, and was recorded
EXTERNAL = "external"  # the engine of a kernel that a trainer runs, and no one here opens

# engines whose precision is not ours to choose
_OTHERS_ROUND = ("table", PACK, "openai_http", "recorded")
# engines that tell the best tokens of a golden position, and never its full logits
BEST_ONLY = (PACK, "openai_http")


class Metadata(Value):
    """What the contract is called."""

    name: Name = Field(description="Also that of the run directory.")
    version: str = "0.0.0"
    title: str = ""
    description: str = ""
    annotations: dict[str, Any] = Field(default_factory=dict, description="Free.")


def base_of(url: str) -> str:
    """Where a server of OpenAI's API is, whether or not the /v1 of its paths was written."""
    return url.rstrip("/").removesuffix("/v1")


class Kernel(Value):
    """A program that evaluates the policy: engine, precision, sampling, and how it runs."""

    engine: str = Field(description="What runs it; external where a trainer does.")
    model: str | None = Field(None, description="A folder or file, from the contract's folder.")
    adapter: str | None = Field(None, description="Folder of a LoRA adapter that PEFT wrote.")
    url: str | None = Field(None, description="Of a server, such as http://127.0.0.1:8000.")
    served: str | None = Field(None, description="What the server calls it; default its only one.")
    dialect: str | None = Field(
        None, description="What kind of server it is; default: it is asked."
    )
    logprobs: Literal["raw", "processed"] | None = Field(
        None, description="Of the server, before or after its sampling; default as its kind has it."
    )
    sampling_defaults: Sampling | None = Field(
        None,
        description="What the server takes for sampling that a request leaves unsaid; default: "
        "it is asked.",
    )
    timeout_s: Number | None = Field(
        None,
        gt=0,
        le=86_400,
        description="Silence after which a server is given up; default two minutes, and a quarter "
        "of a second for each new token.",
    )
    key_env: str | None = Field(None, description="Variable that holds the key of the server.")
    python: str | None = Field(
        None, description="A virtual environment or interpreter that runs it, if not this one."
    )
    title: str = Field("", description="What reports call it.")
    dtype: Literal["float64", "float32", "bfloat16", "float16"] = "float32"
    attention: Literal[
        "eager", "sdpa", "sdpa_math", "sdpa_flash", "sdpa_efficient", "sdpa_cudnn"
    ] = Field(
        "eager",
        description="sdpa: torch chooses the backend; sdpa_NAME, of transformers: this one.",
    )
    device: Device | None = Field(None, description="cpu, cuda or cuda:1; default cpu.")
    quantization: str | None = Field(None, description="The exact name, such as int8_weight_only.")
    head_dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        None, description="Of the product that makes the logits; default dtype."
    )
    path: Path | None = Field(None, description="prefill or decode, where it can be chosen.")
    batch_size: Whole = Field(32, ge=1, le=4096, description="Sequences that run together.")
    prefill_chunk: Whole | None = Field(
        None, ge=2, le=1 << 20, description="Tokens of a step of a prefill; default all at once."
    )
    prefix_cache: Whole | None = Field(
        None, ge=1, le=4096, description="Tokens of a block of the prefix cache; default none."
    )
    kv_cache: str | None = Field(
        None,
        description="Type of the cache of keys and values, such as q8_0 of llamacpp; default the "
        "engine's own.",
    )
    options: dict[str, bool | int | float | str | dict[str, Any]] | None = Field(
        None,
        description="Arguments of the engine itself, such as {async_scheduling: true} of vllm or "
        "{ranks: 2} of transformers.",
    )
    sampling: Sampling | None = Field(
        None, description="Of train, where its transform differs from the workload's."
    )
    mask: Literal["own", "replayed"] = Field(
        "own", description="replayed: it takes over the tokens that infer's filters kept."
    )
    routes: Literal["replayed"] | None = Field(
        None,
        description="Of train, for a mixture of experts: replayed, it uses the experts that infer "
        "recorded; default its own.",
    )
    weights_from: str | None = Field(None, description="Digest of the weights it was made from.")
    fault: dict[str, Any] | None = Field(None, description="One fault, injected on purpose.")

    def __str__(self) -> str:
        cache = f"kv {self.kv_cache}" if self.kv_cache else ""
        head = f"head {self.head_dtype}" if self.head_dtype else ""
        parts = [self.dtype, self.attention, self.quantization or "", cache, head]
        parts += [f"adapter {PurePath(self.adapter).name}" if self.adapter else ""]
        parts += [self.device or ""]
        parts += [f"{name}={brief(value)}" for name, value in (self.options or {}).items()]
        text = " ".join(p for p in parts if p) if self.engine not in _OTHERS_ROUND else ""
        where = self.url or PurePath(self.model or "").name
        name = self.title or f"{self.engine} {where} {text}".strip()
        return f"{name} [fault: {', '.join(self.fault)}]" if self.fault else name


class Kernels(Value):
    """The two sides: train is measured against, infer is under test."""

    train: Kernel
    infer: Kernel


class Envelope(Value):
    """The conditions in which the promises were shown."""

    batch_size: Range | None = None
    prompt_tokens: Range | None = None
    path: Path | None = None
    outside: Literal["stable", "refuse", "infer"] = Field(
        "stable", description="Who serves a request that lies outside."
    )


class Runtime(Value):
    """The envelope, and the promises about time and speed."""

    envelope: Envelope | None = None
    clauses: tuple[Clause, ...] = ()


class Observability(Value):
    """What is recorded, and the preconditions of the other promises."""

    record: tuple[Literal[RECORDS], ...] = ()  # type: ignore[valid-type]
    clauses: tuple[Clause, ...] = ()


class Weights(Value):
    """What the contract asks of the weights on both sides."""

    identity: Literal["verified", "derived", "declared"] | None = Field(
        None, description="The weakest grade that is accepted; default whatever can be had."
    )
    changes: Literal["never", "every_step"] = Field(
        "never", description="every_step: a trainer updates them; evidence names its steps."
    )


class Contract(Value):
    """The promises that two kernels keep to each other (arXiv 2606.07581: C = (N, S, R, O, Pi))."""

    apiVersion: Literal[API_VERSION]  # type: ignore[valid-type]
    kind: Literal["KernelContract"]
    metadata: Metadata
    kernels: Kernels
    stable: Kernel | None = Field(None, description="The kernel that serves when infer may not.")
    weights: Weights = Weights.model_construct()
    bitwise: bool = Field(
        False,
        description="true: both kernels compute the same bits, so equal logprobs are expected; "
        "otherwise columns that are equal in every bit are no evidence.",
    )
    workload: Workload | None = None
    workloads: Workloads | None = Field(
        None, description="Several workloads, by name, instead of workload."
    )
    golden: Golden | None = None
    labels: dict[Name, LabelSource] = Field(
        default_factory=dict, description="Where live traffic has its labels."
    )
    slices: tuple[SliceRule, ...] = ()
    confidence: Number = Field(
        0.95, gt=0.5, lt=1, description="1 - confidence is the chance of a wrong answer."
    )
    claim: Claim = Field(
        "population",
        description="population: all tokens that the workload's prompts generate; realised: those "
        "that were measured.",
    )
    reward: Reward | None = None
    gradient: Gradient | None = None
    numerical: tuple[Clause, ...] = Field((), description="Facts about the golden texts.")
    statistical: tuple[Clause, ...] = Field((), description="Promises about sampled tokens.")
    runtime: Runtime = Runtime.model_construct()
    observability: Observability = Observability.model_construct()
    trend: Trend | None = Field(None, description="Of a trainer's steps, against good runs.")
    escalation: tuple[Escalation, ...] = Field((), description="What follows from a verdict.")
    routing: Routing = Routing.model_construct()
    promotion: Promotion = Promotion.model_construct()

    # where each part stands in the text that the contract was read from, if it was
    _near: Callable[[Place], Where] | None = PrivateAttr(None)

    @property
    def all_workloads(self) -> dict[str, Workload]:
        """Every workload under its name; the single one is named "workload"."""
        named = {"workload": self.workload} if self.workload is not None else {}
        if isinstance(self.workloads, Mapping):
            return {**named, **self.workloads}
        return {**named, **{w.name: w.unnamed for w in self.workloads or ()}}

    def workload_of(self, clause: Clause) -> str:
        """The workload of a clause: its own, otherwise the first; "" if there is none."""
        return clause.workload or next(iter(self.all_workloads), "")

    def placed(self, near: Callable[[Place], Where]) -> Contract:
        """The same contract, which knows its text."""
        contract = self.model_copy()
        contract._near = near
        return contract

    def where(self, *place: str | int) -> Where | None:
        """The place of a part, such as ("statistical", 0, "at_most"), or of its parent."""
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
    def meaning(self) -> dict[str, Any]:
        """The scope of evidence: without display names and paths.

        The content of files counts separately: evidence is keyed by the digests of
        weights, vocabulary and prompts besides that of the contract.
        """
        data = self.model_dump(mode="json", exclude=_NOT_MEANING)
        if not self.bitwise:  # a key at its default is not in the digest
            del data["bitwise"]
        if self.trend is None:
            del data["trend"]
        for kernel in (*data["kernels"].values(), data["stable"] or {}):
            for key in _OPTIONAL:
                if kernel.get(key, 0) is None:
                    del kernel[key]
            if kernel.get("options"):  # the place of a draft is none of its meaning
                kernel["options"] = moved_options(kernel["options"], lambda _: "")
        sections = (data[name] for name in ("numerical", "statistical", "runtime", "observability"))
        for clauses in sections:
            for clause in clauses["clauses"] if isinstance(clauses, dict) else clauses:
                if clause["times_format"] is None:
                    del clause["times_format"]
        workloads = _named(data["workloads"])
        # the default of clauses, the traffic, and the workload whose checks need no suffix
        several = self.workload is None and len(workloads) > 1
        first = {"first": next(iter(workloads))} if several else {}
        return {**data, "workloads": workloads, **first}

    @property
    def digest(self) -> str:
        """Of the meaning; comments do not count, and of the order of keys the first workload."""
        return digest_of(self.meaning)


def _named(workloads: Any) -> dict[str, Any]:
    """A mapping and a list of the same workloads mean the same; files count by themselves."""
    items = workloads.items() if isinstance(workloads, Mapping) else enumerate(workloads or ())
    return {w.pop("name", n): {k: v for k, v in w.items() if k != "prompts"} for n, w in items}


_OPTIONAL = (
    *("adapter", "device", "head_dtype", "prefill_chunk", "prefix_cache", "kv_cache", "options"),
    "routes",
)
# the place of a kernel does not change its results: its engine reports the build; each row of
# traffic has its sampling parameters
_KERNEL = {
    *("model", "adapter", "title", "url", "served", "sampling_defaults", "timeout_s", "python"),
    "key_env",
}
_NOT_MEANING: dict[str, Any] = {
    "metadata": {"annotations", "title", "description", "version"},
    "kernels": {"train": _KERNEL, "infer": _KERNEL},
    "stable": _KERNEL,
    "workload": {"prompts"},
    "golden": {"prompts"},
    # a function counts by its source, which the evidence is keyed by as well
    "reward": {"of"},
    "trend": {"reference"},  # by its digest
    # evidence is valid at every evaluation: how much to gather and what to do with it may change
    "promotion": True,
    "routing": True,
    "escalation": True,
}
