# Contracts that say everything, one move of each of their fields, and random pairs of them.

from __future__ import annotations

import copy
import json
from typing import Any, NamedTuple

from hypothesis import reject
from hypothesis import strategies as st
from pydantic import ValidationError

from servanda.authoring.diff.values import Kind
from servanda.contract.model import API_VERSION, Contract
from servanda.contract.objective import Weighting

KERNEL = {"engine": "table", "model": "a"}
SAMPLING = {"temperature": 1.0, "top_p": 1.0}
BASE: dict[str, Any] = {
    "apiVersion": API_VERSION,
    "kind": "KernelContract",
    "metadata": {"name": "x", "version": "1.0.0"},
    "kernels": {"train": {**KERNEL, "sampling": SAMPLING}, "infer": KERNEL},
    "stable": KERNEL,
    "weights": {"identity": "derived"},
    "workloads": {
        "chat": {"prompts": "chat.jsonl", "sampling": SAMPLING},
        "code": {"prompts": "c"},
    },
    "golden": {"prompts": "golden.jsonl"},
    "labels": {"tenant": {"from": "api_key"}},
    "slices": [
        {"name": "domain", "split": "labels.domain"},
        {"name": "depth", "split": "context.position", "at": [8, 16]},
        {"name": "rare", "match": {"outcome.rank": {"gte": 10}}},
        {"name": "ranks", "split": "outcome.rank", "at": [2, 10]},
    ],
    "reward": {"range": [0, 1], "of": "exact_answer"},
    "gradient": {"advantage": 2.0, "score_norm": 1.0, "weighting": "naive"},
    "numerical": [{"id": "drift", "metric": "logit_osc_nats", "at_most": 0.6}],
    "statistical": [
        {"id": "tv", "metric": "tv", "aggregate": "mean", "at_most": 0.02},
        {"id": "tail", "metric": "abs_log_ratio_nats", "aggregate": "p99", "at_most": 0.2,
         "slices": ["all", "domain"], "stages": ["offline", "canary"]},
        {"id": "rel", "metric": "tv", "aggregate": "mean",
         "at_most": {"times": 3, "of": "self_noise"}},
        {"id": "gap", "metric": "mass_gap", "at_most": 0.01},
        {"id": "shown", "metric": "k3_nats", "aggregate": "mean", "at_most": 0.1,
         "mode": "monitor"},
    ],
    "runtime": {
        "envelope": {"batch_size": [1, 32], "prompt_tokens": [1, 512], "path": "decode"},
        "clauses": [
            {"id": "ttft", "metric": "time_to_first_token_seconds", "aggregate": "p95",
             "at_most": {"times": 1.1, "of": "stable"}, "load": {"concurrency": 8}},
            {"id": "speed", "metric": "tokens_per_second", "at_least": 1000,
             "load": {"concurrency": 8}},
        ],
    },
    "observability": {
        "record": ["fingerprint", "token_ids"],
        "clauses": [
            {"id": "finite", "metric": "valid_ratio", "at_least": 0.999},
            {"id": "coverage", "metric": "scoring_rate", "at_least": 0.005, "over": "1h"},
            {"id": "split", "metric": "sample_ratio", "stages": ["canary", "full"]},
        ],
    },
    "trend": {"reference": "a.json"},
    "escalation": [
        {"when": {"clause": "tail", "is": "violated"}, "do": ["hold", {"page": "oncall"}]},
        {"when": {"section": "statistical", "is": "violated"}, "do": ["hold"]},
    ],
    "routing": {"dwell": "15m"},
    "promotion": {
        "offline": {"prompt_groups": [400, 6000]},
        "shadow": {"share": 0.05},
        "canary": {"steps": [0.01, 0.05], "dwell": "10m"},
        "full": {"sample": 0.01},
        "valid_for": "30d",
    },
}  # fmt: skip
ABSENT = "(absent)"


class Move(NamedTuple):
    """A field of a model, where it stands, two values of it, and what a move between them is."""

    model: str
    field: str
    path: str
    old: Any
    new: Any
    kind: Kind

    @property
    def place(self) -> str:
        """As a change names it: ids in place of indexes."""
        names, data = [], BASE
        for part in _parts(self.path):
            data = data[part] if not isinstance(data, dict) or part in data else {}
            if isinstance(part, int):
                names.append(data.get("id") or data.get("name") or _flow(data["when"]))
            else:
                names.append(part)
        return ".".join(names)


def _flow(when: dict[str, str]) -> str:
    return f"{{{', '.join(f'{k}: {v}' for k, v in when.items())}}}"


def _parts(path: str) -> list[str | int]:
    return [int(part) if part.isdigit() else part for part in path.split("/")]


def put(data: Any, path: str, value: Any) -> None:
    """Set a value in plain data, or take it out."""
    *holders, last = _parts(path)
    for part in holders:
        data = data.setdefault(part, {}) if isinstance(data, dict) else data[part]
    if isinstance(value, str) and value == ABSENT:
        data.pop(last, None)
    else:
        data[last] = copy.deepcopy(value)


def fresh() -> dict[str, Any]:
    """The base, in which no two places share a value."""
    return json.loads(json.dumps(BASE))


def contract(*edits: tuple[str, Any]) -> Contract:
    data = fresh()
    for path, value in edits:
        put(data, path, value)
    return Contract.model_validate(data)


TV, TAIL, REL, GAP = (f"statistical/{i}" for i in range(4))
TTFT, SPEED = (f"runtime/clauses/{i}" for i in range(2))
INFER, CHAT, CANARY = "kernels/infer", "workloads/chat", "promotion/canary"
FAULT = {"bf16_positions": True}

COLDER = {"temperature": 0.7}

MOVES = [
    Move("Metadata", "name", "metadata/name", "x", "y", "retargeted"),
    Move("Metadata", "version", "metadata/version", "1.0.0", "1.0.1", "cosmetic"),
    Move("Metadata", "title", "metadata/title", ABSENT, "X", "cosmetic"),
    Move("Metadata", "description", "metadata/description", "a", "b", "cosmetic"),
    Move("Metadata", "annotations", "metadata/annotations", ABSENT, {"team": "a"}, "cosmetic"),
    Move("Kernel", "engine", f"{INFER}/engine", "table", "vllm", "retargeted"),
    Move("Kernel", "model", f"{INFER}/model", "a", "b", "retargeted"),
    Move("Kernel", "adapter", f"{INFER}/adapter", ABSENT, "a", "retargeted"),
    Move("Kernel", "url", f"{INFER}/url", ABSENT, "http://a", "cosmetic"),
    Move("Kernel", "served", f"{INFER}/served", ABSENT, "m", "retargeted"),
    Move("Kernel", "dialect", f"{INFER}/dialect", ABSENT, "vllm", "retargeted"),
    Move("Kernel", "logprobs", f"{INFER}/logprobs", "raw", "processed", "retargeted"),
    Move("Kernel", "sampling_defaults", f"{INFER}/sampling_defaults", ABSENT, COLDER, "cosmetic"),
    Move("Kernel", "timeout_s", f"{INFER}/timeout_s", 1.0, 2.0, "cosmetic"),
    Move("Kernel", "key_env", f"{INFER}/key_env", ABSENT, "A_KEY", "cosmetic"),
    Move("Kernel", "python", f"{INFER}/python", ABSENT, ".venv", "cosmetic"),
    Move("Kernel", "title", f"{INFER}/title", ABSENT, "ours", "cosmetic"),
    Move("Kernel", "dtype", f"{INFER}/dtype", "float32", "bfloat16", "retargeted"),
    Move("Kernel", "attention", f"{INFER}/attention", "eager", "sdpa", "retargeted"),
    Move("Kernel", "prefill_chunk", f"{INFER}/prefill_chunk", ABSENT, 512, "retargeted"),
    Move("Kernel", "device", f"{INFER}/device", "cpu", "cuda", "retargeted"),
    Move("Kernel", "quantization", f"{INFER}/quantization", ABSENT, "w8a8", "retargeted"),
    Move("Kernel", "head_dtype", f"{INFER}/head_dtype", ABSENT, "float32", "retargeted"),
    Move("Kernel", "path", f"{INFER}/path", "prefill", "decode", "retargeted"),
    Move("Kernel", "batch_size", f"{INFER}/batch_size", 32, 16, "retargeted"),
    Move("Kernel", "prefix_cache", f"{INFER}/prefix_cache", ABSENT, 16, "retargeted"),
    Move("Kernel", "kv_cache", f"{INFER}/kv_cache", ABSENT, "q8_0", "retargeted"),
    Move("Kernel", "options", f"{INFER}/options", ABSENT, {"block_size": 16}, "retargeted"),
    Move("Kernel", "sampling", f"{INFER}/sampling", ABSENT, SAMPLING, "added"),
    Move("Kernel", "mask", f"{INFER}/mask", "own", "replayed", "retargeted"),
    Move("Kernel", "routes", f"{INFER}/routes", ABSENT, "replayed", "retargeted"),
    Move("Kernel", "weights_from", f"{INFER}/weights_from", ABSENT, "0a", "retargeted"),
    Move("Kernel", "fault", f"{INFER}/fault", ABSENT, FAULT, "retargeted"),
    Move("Kernels", "train", "kernels/train/dtype", "float32", "float16", "retargeted"),
    Move("Kernels", "infer", f"{INFER}/dtype", "float64", "float16", "retargeted"),
    Move("Contract", "kernels", "kernels/train/attention", "eager", "sdpa", "retargeted"),
    Move("Contract", "stable", "stable", ABSENT, KERNEL, "added"),
    Move("Contract", "metadata", "metadata/title", "a", "b", "cosmetic"),
    Move("Sampling", "temperature", "kernels/train/sampling/temperature", 1.0, 0.9, "retargeted"),
    Move("Sampling", "top_k", "kernels/train/sampling/top_k", 5, 9, "retargeted"),
    Move("Sampling", "top_p", "kernels/train/sampling/top_p", 1.0, 0.9, "retargeted"),
    Move("Sampling", "min_p", "kernels/train/sampling/min_p", ABSENT, 0.1, "retargeted"),
    Move("WorkloadSampling", "temperature", f"{CHAT}/sampling/temperature", 1.0, 0.9,
         "retargeted"),
    Move("WorkloadSampling", "top_k", f"{CHAT}/sampling/top_k", ABSENT, 9, "retargeted"),
    Move("WorkloadSampling", "top_p", f"{CHAT}/sampling/top_p", 1.0, 0.9, "retargeted"),
    Move("WorkloadSampling", "min_p", f"{CHAT}/sampling/min_p", 0.2, 0.1, "retargeted"),
    Move("WorkloadSampling", "max_new_tokens", f"{CHAT}/sampling/max_new_tokens", 8, 9,
         "retargeted"),
    Move("WorkloadSampling", "seed", f"{CHAT}/sampling/seed", ABSENT, 9, "retargeted"),
    Move("Weights", "identity", "weights/identity", "declared", "derived", "tightened"),
    Move("Weights", "identity", "weights/identity", "derived", "verified", "tightened"),
    Move("Weights", "identity", "weights/identity", ABSENT, "declared", "tightened"),
    Move("Weights", "changes", "weights/changes", "never", "every_step", "retargeted"),
    Move("Contract", "weights", "weights/identity", ABSENT, "verified", "tightened"),
    Move("Workload", "source", f"{CHAT}/source", "prompts", "trainer", "retargeted"),
    Move("Workload", "prompts", f"{CHAT}/prompts", "chat.jsonl", "b", "retargeted"),
    Move("Workload", "mode", f"{CHAT}/mode", "rollout", "score", "retargeted"),
    Move("Workload", "samples", f"{CHAT}/samples", 1, 2, "retargeted"),
    Move("Workload", "sampling", f"{CHAT}/sampling/seed", 1, 2, "retargeted"),
    Move("Workload", "round", f"{CHAT}/round", 64, 32, "retargeted"),
    Move("Contract", "workload", "workloads/third", ABSENT, {"prompts": "t"}, "added"),
    Move("Golden", "prompts", "golden/prompts", "golden.jsonl", "b", "retargeted"),
    Move("Golden", "path", "golden/path", "decode", "prefill", "retargeted"),
    Move("Contract", "golden", "golden", ABSENT, {"prompts": "g"}, "added"),
    Move("LabelSource", "source", "labels/tenant/from", "api_key", "route", "retargeted"),
    Move("Contract", "labels", "labels/team", ABSENT, {"from": "route"}, "added"),
    Move("SliceRule", "split", "slices/0/split", "labels.domain", "labels.d", "retargeted"),
    Move("SliceRule", "match", "slices/2/match", {"outcome.rank": {"gte": 10}},
         {"outcome.rank": {"gte": 11}}, "retargeted"),
    Move("SliceRule", "at", "slices/1/at", [8], [8, 16], "tightened"),
    Move("SliceRule", "at", "slices/1/at", [8, 16], [9, 16], "retargeted"),
    Move("SliceRule", "at", "slices/3/at", [2], [2, 10], "retargeted"),
    Move("SliceRule", "most", "slices/0/most", 8, 9, "tightened"),
    Move("SliceRule", "most", "slices/3/most", 8, 9, "retargeted"),
    Move("Contract", "slices", "slices/0/most", ABSENT, 10, "tightened"),
    Move("Contract", "confidence", "confidence", 0.9, 0.95, "tightened"),
    Move("Contract", "confidence", "confidence", ABSENT, 0.99, "tightened"),
    Move("Contract", "bitwise", "bitwise", ABSENT, True, "loosened"),
    Move("Contract", "claim", "claim", "population", "realised", "retargeted"),
    Move("Reward", "range", "reward/range", [0, 1], [-1, 1], "tightened"),
    Move("Reward", "range", "reward/range", [0, 1], [-1, 0.5], "retargeted"),
    Move("Reward", "of", "reward/of", "exact_answer", "contains_answer", "retargeted"),
    Move("Contract", "reward", "reward", ABSENT, {"range": [0, 2]}, "added"),
    Move("Gradient", "advantage", "gradient/advantage", 2.0, 3.0, "tightened"),
    Move("Gradient", "advantage", "gradient/advantage", 2.0, {"group_size": 8}, "retargeted"),
    Move("GroupAdvantage", "group_size", "gradient/advantage", {"group_size": 8},
         {"group_size": 9}, "tightened"),
    Move("GroupAdvantage", "std", "gradient/advantage", {"group_size": 8},
         {"group_size": 8, "std": "population"}, "retargeted"),
    Move("Gradient", "score_norm", "gradient/score_norm", 1.0, 2.0, "tightened"),
    Move("Gradient", "score_norm", "gradient/score_norm", 1.0, "logit_space", "retargeted"),
    Move("Gradient", "weighting", "gradient/weighting", "naive", "is", "retargeted"),
    Move("Gradient", "weighting", "gradient/weighting", "naive", {"tis": 2.0}, "retargeted"),
    *(
        Move("Weighting", name, "gradient/weighting", {name: old}, {name: new}, "retargeted")
        for name, old, new in (
            ("tis", 2, 3), ("clip", 0.1, 0.2), ("mis", [0.5, 2], [0.5, 3]),
            ("icepop", [0.5, 2], [0.5, 3]), ("reject", [0.5, 2], [0.5, 3]),
        )
    ),
    Move("Gradient", "loss", "gradient/loss", "token_mean", "sequence_mean", "retargeted"),
    Move("Gradient", "clip_range", "gradient/clip_range", ABSENT, [0.2, 0.2], "retargeted"),
    Move("Gradient", "ratio", "gradient/ratio", "bypass", "decoupled", "retargeted"),
    Move("Contract", "gradient", "gradient", ABSENT, {"advantage": 1.0}, "added"),
    Move("Clause", "metric", f"{TV}/metric", "tv", "top1_flip", "retargeted"),
    Move("Clause", "aggregate", f"{TAIL}/aggregate", "p99", "p99.9", "tightened"),
    Move("Clause", "aggregate", f"{TAIL}/aggregate", "p95", "p99", "tightened"),
    Move("Clause", "aggregate", f"{TAIL}/aggregate", "p99", "max", "tightened"),
    Move("Clause", "aggregate", f"{TAIL}/aggregate", "p99", "p99.0", "cosmetic"),
    Move("Clause", "aggregate", f"{TAIL}/aggregate", "mean", "p99", "retargeted"),
    Move("Clause", "aggregate", "numerical/0/aggregate", ABSENT, "max", "cosmetic"),
    Move("Clause", "aggregate", f"{SPEED}/aggregate", "p50", "p90", "retargeted"),
    Move("Clause", "at_most", f"{TV}/at_most", 0.05, 0.02, "tightened"),
    Move("Clause", "at_most", f"{TV}/at_most", ABSENT, 0.02, "tightened"),
    # without a limit it is 0.02
    Move("Clause", "at_most", "observability/clauses/2/at_most", ABSENT, 0.05, "loosened"),
    Move("Clause", "at_most", f"{TV}/at_most", 0.02, {"times": 2, "of": "stable"}, "retargeted"),
    Move("Clause", "at_least", f"{SPEED}/at_least", 1000, 1200, "tightened"),
    Move("Clause", "times_format", f"{TV}/times_format", 1.5, 1.25, "tightened"),
    Move("Clause", "times_format", f"{TV}/times_format", 1.5, ABSENT, "tightened"),
    Move("Clause", "clip", f"{TV}/clip", 1.0, 2.0, "retargeted"),
    Move("Clause", "clip", f"{TV}/clip", ABSENT, 2.0, "retargeted"),
    Move("Clause", "severity", f"{TV}/severity", "warning", "error", "tightened"),
    Move("Clause", "severity", f"{TV}/severity", ABSENT, "critical", "tightened"),
    Move("Clause", "mode", f"{TV}/mode", "monitor", "enforce", "tightened"),
    Move("Clause", "slices", f"{TAIL}/slices", ["all"], ["all", "domain"], "tightened"),
    Move("Clause", "slices", f"{TAIL}/slices", ["all"], ABSENT, "tightened"),
    Move("Clause", "slices", f"{TAIL}/slices", ["all"], ["domain"], "retargeted"),
    Move("Clause", "slices", f"{TAIL}/slices", ["all", "domain", "depth"], ABSENT, "cosmetic"),
    Move("Clause", "workload", f"{TV}/workload", "chat", "code", "retargeted"),
    Move("Clause", "workload", f"{TV}/workload", ABSENT, "code", "retargeted"),
    Move("Clause", "workload", f"{TV}/workload", ABSENT, "chat", "cosmetic"),
    Move("Clause", "stages", f"{TAIL}/stages", ["offline"], ["offline", "full"], "tightened"),
    Move("Clause", "stages", f"{TAIL}/stages", ["offline"], ["full"], "retargeted"),
    Move("Clause", "stages", f"{TAIL}/stages", ["offline"], ABSENT, "tightened"),
    Move("Clause", "claim", f"{TV}/claim", "population", "realised", "retargeted"),
    Move("Clause", "claim", f"{TV}/claim", ABSENT, "population", "cosmetic"),
    Move("Clause", "required", f"{TV}/required", ABSENT, True, "tightened"),
    Move("Clause", "load", f"{TTFT}/load", ABSENT, {"concurrency": 8}, "added"),
    Move("Clause", "over", "observability/clauses/1/over", "1h", "30m", "retargeted"),
    Move("Contract", "numerical", "numerical/0/at_most", 0.6, 0.5, "tightened"),
    Move("Relative", "times", f"{REL}/at_most/times", 3, 2.5, "tightened"),
    Move("Relative", "of", f"{REL}/at_most/of", "self_noise", "stable", "retargeted"),
    Move("Load", "concurrency", f"{TTFT}/load/concurrency", 8, 16, "tightened"),
    Move("Load", "concurrency", f"{SPEED}/load/concurrency", 8, 16, "retargeted"),
    Move("Load", "new_tokens", f"{TTFT}/load/new_tokens", 8, 16, "retargeted"),
    Move("Load", "prompt_tokens", f"{TTFT}/load/prompt_tokens", 8, 16, "retargeted"),
    Move("Runtime", "envelope", "runtime/envelope", ABSENT, {"path": "decode"}, "added"),
    Move("Contract", "runtime", f"{TTFT}/at_most/times", 1.1, 1.05, "tightened"),
    Move("Envelope", "batch_size", "runtime/envelope/batch_size", [1, 32], [1, 64], "tightened"),
    Move("Envelope", "batch_size", "runtime/envelope/batch_size", [1, 32], [2, 64], "retargeted"),
    Move("Envelope", "prompt_tokens", "runtime/envelope/prompt_tokens", [2, 9], [1, 9],
         "tightened"),
    Move("Envelope", "prompt_tokens", "runtime/envelope/prompt_tokens", ABSENT, [1, 9],
         "retargeted"),
    Move("Envelope", "path", "runtime/envelope/path", "prefill", "decode", "retargeted"),
    Move("Envelope", "outside", "runtime/envelope/outside", "infer", "stable", "tightened"),
    Move("Envelope", "outside", "runtime/envelope/outside", "refuse", "stable", "retargeted"),
    Move("Observability", "record", "observability/record", ["token_ids"],
         ["path", "token_ids"], "tightened"),
    Move("Contract", "observability", "observability/record", ABSENT, ["path"], "tightened"),
    Move("Trend", "reference", "trend/reference", "a.json", "b.json", "retargeted"),
    Move("Trend", "digest", "trend/digest", ABSENT, "0123", "retargeted"),
    Move("Trend", "metrics", "trend/metrics", ["k3_nats"], ["coverage"], "retargeted"),
    Move("Trend", "severity", "trend/severity", "warning", "error", "tightened"),
    Move("Trend", "mode", "trend/mode", "monitor", "enforce", "tightened"),
    Move("Contract", "trend", "trend", ABSENT, {"reference": "a.json"}, "added"),
    Move("Escalation", "do", "escalation/0/do", ["hold"], ["hold", {"page": "a"}], "tightened"),
    Move("Escalation", "do", "escalation/0/do", ["hold"], ["halt"], "retargeted"),
    Move("Escalation", "do", "escalation/0/do", ["hold", "halt"], ["halt", "hold"], "cosmetic"),
    Move("Contract", "escalation", "escalation/1/do", ["hold"], ["hold", "halt"], "tightened"),
    Move("Routing", "enter_evidence", "routing/enter_evidence", 1000, 500, "tightened"),
    Move("Routing", "leave_evidence", "routing/leave_evidence", 20, 30, "tightened"),
    Move("Routing", "dwell", "routing/dwell", "15m", "1h", "tightened"),
    Move("Routing", "mode", "routing/mode", "observe", "enforce", "tightened"),
    Move("Routing", "share", "routing/share", 0.5, 0.4, "tightened"),
    Move("Routing", "horizon", "routing/horizon", 10_000, 5000, "tightened"),
    Move("Routing", "keys", "routing/min_users", 20, 10, "tightened"),
    Move("Routing", "longest_dwell", "routing/longest_dwell", "1d", "2d", "tightened"),
    Move("Routing", "moves_per_hour", "routing/moves_per_hour", 6, 4, "tightened"),
    Move("Routing", "most_diverted", "routing/most_diverted", 0.3, 0.5, "tightened"),
    Move("Routing", "stable_in_flight", "routing/stable_in_flight", 64, 128, "tightened"),
    Move("Routing", "stable_in_flight", "routing/stable_in_flight", ABSENT, 64, "tightened"),
    Move("Routing", "sample", "routing/sample", 0.01, 0.02, "tightened"),
    Move("Routing", "sample_near", "routing/sample_near", 0.2, 0.5, "tightened"),
    Move("Routing", "mirror", "routing/mirror", 0.1, 0.2, "tightened"),
    Move("Routing", "budget", "routing/scorer_utilisation", 0.5, 1.0, "tightened"),
    Move("Routing", "expires", "routing/expires", "10m", "5m", "tightened"),
    Move("Routing", "without_snapshot", "routing/without_snapshot", "infer", "stable",
         "tightened"),
    Move("Routing", "replicas", "routing/replicas", {}, {"infer": [{"url": "http://a"}]},
         "cosmetic"),
    Move("Replicas", "infer", "routing/replicas/infer", [{"url": "http://a"}],
         [{"url": "http://a"}, {"url": "http://b"}], "cosmetic"),
    Move("Replicas", "stable", "routing/replicas/stable", ABSENT, [{"url": "http://a"}],
         "cosmetic"),
    Move("Replica", "url", "routing/replicas/infer", [{"url": "http://a"}], [{"url": "http://b"}],
         "cosmetic"),
    Move("Replica", "weight", "routing/replicas/infer", [{"url": "http://a", "weight": 1}],
         [{"url": "http://a", "weight": 2}], "cosmetic"),
    Move("Contract", "routing", "routing/leave_evidence", ABSENT, 30, "tightened"),
    Move("StageRule", "sequences", f"{CANARY}/prompt_groups", [1, 2], [2, 3], "tightened"),
    Move("StageRule", "sequences", f"{CANARY}/prompt_groups", [1, 3], [2, 3], "tightened"),
    Move("StageRule", "sequences", f"{CANARY}/prompt_groups", [2, 3], [1, 4], "retargeted"),
    Move("StageRule", "share", "promotion/shadow/share", 0.05, 0.1, "tightened"),
    Move("StageRule", "share", "promotion/shadow/share", ABSENT, 0.05, "cosmetic"),
    Move("StageRule", "sample", "promotion/full/sample", ABSENT, 0.02, "tightened"),
    Move("StageRule", "sample", "promotion/shadow/sample", 0.5, ABSENT, "tightened"),
    Move("StageRule", "steps", f"{CANARY}/steps", [0.05], [0.01, 0.05], "tightened"),
    Move("StageRule", "steps", f"{CANARY}/steps", ABSENT, [0.05], "cosmetic"),
    Move("StageRule", "steps", f"{CANARY}/steps", [0.05], [0.01], "retargeted"),
    Move("StageRule", "dwell", f"{CANARY}/dwell", "10m", "1h", "tightened"),
    Move("StageRule", "dwell", f"{CANARY}/dwell", ABSENT, "1h", "tightened"),
    Move("StageRule", "approval", f"{CANARY}/approval", ABSENT, "required", "tightened"),
    Move("StageRule", "if_inconclusive", f"{CANARY}/if_inconclusive", "wait", "hold",
         "tightened"),
    Move("StageRule", "if_inconclusive", f"{CANARY}/if_inconclusive", "hold", "roll_back",
         "tightened"),
    Move("Promotion", "offline", "promotion/offline/prompt_groups", [1, 2], [2, 2], "tightened"),
    *(
        Move("Promotion", stage, f"promotion/{stage}", ABSENT, {}, "added")
        for stage in ("shadow", "canary", "full")
    ),
    Move("Promotion", "valid_for", "promotion/valid_for", "30d", "7d", "tightened"),
    Move("Promotion", "valid_for", "promotion/valid_for", ABSENT, "7d", "tightened"),
    Move("Contract", "promotion", "promotion/shadow/approval", ABSENT, "required", "tightened"),
]  # fmt: skip

# fields that two contracts which are compared cannot differ in, or that are what items are found
# again by, or that are compared where another one is
NO_MOVE = {
    ("Contract", "apiVersion"),
    ("Contract", "kind"),
    ("Contract", "workloads"),
    ("Contract", "statistical"),
    ("Runtime", "clauses"),
    ("Observability", "clauses"),
    ("Clause", "id"),
    ("SliceRule", "name"),
    ("Escalation", "when"),
}
assert {*Weighting.model_fields} == {m.field for m in MOVES if m.model == "Weighting"}


@st.composite
def contracts(draw: st.DrawFn) -> Contract:
    """A contract with some of the moves made, and some of its parts taken out."""
    data = fresh()
    for move in draw(st.lists(st.sampled_from(MOVES), max_size=8)):
        put(data, move.path, draw(st.sampled_from([move.old, move.new])))
    for family in (data["statistical"], data["slices"], data["escalation"]):
        gone = draw(st.sets(st.integers(0, len(family) - 1), max_size=2))
        family[:] = [item for i, item in enumerate(family) if i not in gone]
        if draw(st.integers(0, 4)) == 0:
            family.reverse()
    if draw(st.integers(0, 4)) == 0:
        data["workloads"] = dict(reversed(data["workloads"].items()))
    if draw(st.booleans()):
        data["workloads"] = [{"name": n, **w} for n, w in data["workloads"].items()]
    try:
        return Contract.model_validate(data)
    except ValidationError:
        reject()  # a load was taken out, and one of its keys put in
