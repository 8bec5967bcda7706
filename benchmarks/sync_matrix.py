"""The matrix of faults of a weight sync and of settings, with the name that each fault gets.

Each drill ends in a row of benchmarks/measured/sync_matrix.json; what is there is not run again.

    python -m benchmarks.sync_matrix [--setting NAME ...] [--faults a,b] [--write]
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import committed

KEPT = committed.KEPT / "sync_matrix.json"
TRL = Path(os.environ.get("SERVANDA_VENVS", committed.ROOT / ".venvs")) / "trl" / "bin" / "python"
LIMIT_S = 7200  # of all drills of a group of processes
# kinds of messages of tests/rl/delta_syncs.py -> what an engine is sent
DELTAS = {
    "values": "the indices of the values that changed, and the values",
    "xor": "the compressed XOR of the bytes before and after",
    "shards": "those of eight shards of a tensor that have another checksum",
    "difference": "changes in int8 with a scale for each row, which it adds",
    "low rank": "one factor of each adapter, while both sides draw the other from a seed",
}
DELTA_SEEDS = 8  # of working syncs of each kind
HANGS_S = 20.0  # how long a drill waits for a server that never answers
UNNAMED = {"", "unfaithful", "unexplained", "undecided"}
SCRIPTS = committed.ROOT / "tests" / "real_rl"
RUNS = committed.ROOT / "build" / "follow"  # scores of finished training runs
Row = dict[str, Any]
Causes = tuple[str, ...]  # those that are right; "" without a fault, "error" for an error


class Setting(NamedTuple):
    """Where syncs are drilled.

    Args:
        faults: fault -> the causes that are right.
        run: drills faults, and keeps the row of each.
    """

    faults: Callable[[], Mapping[str, Causes]]
    run: Callable[[str, Sequence[str]], None]


def judged(row: Row) -> str:
    """Of a fault: right, unexplained, undecided, wrong, passed; else right, undecided, alarm."""
    if row["outcome"] == "inconclusive" and row["cause"] in UNNAMED:
        return "undecided"
    if "" in row["expected"]:
        return "right" if row["outcome"] == "holds" else "alarm"
    if row["outcome"] == "holds":
        return "passed"
    if row["cause"] in row["expected"]:
        return "right"
    return "unexplained" if row["cause"] in UNNAMED else "wrong"


def rows() -> list[Row]:
    """All kept rows, in the order of the settings and of the names of faults."""
    found = json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.exists() else []
    order = [*SETTINGS]
    return sorted(found, key=lambda row: (order.index(row["setting"]), row["fault"]))


def keep(setting: str, fault: str, detector: str, **said: Any) -> None:
    """Add a row, or put it in the place of an older one."""
    row: Row = {"setting": setting, "fault": fault, "detector": detector, **said}
    row["expected"] = [*SETTINGS[setting].faults()[fault]]
    row["named"] = judged(row)
    with KEPT.open("a+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # settings may run at the same time
        file.seek(0)
        old = json.loads(file.read() or "[]")
        kept = [r for r in old if (r["setting"], r["fault"]) != (setting, fault)]
        file.truncate(0)
        lines = ",\n".join(json.dumps(one, ensure_ascii=False) for one in [*kept, row])
        file.write(f"[\n{lines}\n]\n")
    print(f"{setting} | {fault} | {row['outcome']} {row['cause']} | {row['named']}", flush=True)


def of_preflight(found: Any, same: bool) -> Row:
    """The outcome of a drill, the phases that showed it, and whether every bit is back."""
    base, phases = found.found, []
    if base.moved_away or base.cast or base.scale or base.mixed:
        phases.append("as found")
    if found.poison.mark == "violated":
        phases.append("randomised")
    if any(group.mark == "violated" for group in found.groups):
        phases.append("groups")
    if not found.back:
        phases.append("restored")
    if found.replicas:
        bad = [i for i, one in enumerate(found.replicas, 1) if one.outcome != "holds"]
        phases += [f"replica {i} of {len(found.replicas)}" for i in bad]
    if found.outcome == "violated" and not phases:
        phases = ["versions and generation"]
    said = {"outcome": found.outcome, "cause": found.cause, "where": ", ".join(phases)}
    return said | {"syncs": found.syncs, "bits": same}


def _sharded_faults() -> dict[str, Causes]:
    from tests.rl.sharded_faults import FAULTS

    return {name: (fault.cause,) for name, fault in FAULTS.items()}


def _on_ranks(world: int) -> Callable[[str, Sequence[str]], None]:
    def run(setting: str, names: Sequence[str]) -> None:
        from tests.rl.sharded_faults import processes

        processes(world, _sharded, setting, names, limit_s=LIMIT_S)

    return run


def _sharded(setting: str, names: Sequence[str]) -> None:
    """Each rank drills; rank 0 keeps the row, with the bits of all ranks."""
    from tests.rl.sharded_faults import local_bits, trainee
    from torch import distributed

    from servanda.rl.sync_drill.drill import preflight

    for name in names:
        subject, _ = trainee(name)
        before = local_bits(subject.module)
        found = preflight(subject)
        ranks: list[Any] = [None] * distributed.get_world_size()
        distributed.all_gather_object(ranks, (found.cause, local_bits(subject.module) == before))
        if distributed.get_rank() == 0:
            assert {cause for cause, _ in ranks} == {found.cause}
            keep(setting, name, "preflight", **of_preflight(found, all(b for _, b in ranks)))


def _of_llama() -> dict[str, Any]:
    from tests.rl.served_weights import TOKENS
    from tests.rl.sync_drill.carried import Names, carried

    square, matrix = "self_attn.q_proj.weight", "mlp.down_proj.weight"
    embed, of = "model.embed_tokens.weight", "model.layers"
    return carried(Names("self_attn", "input_layernorm", matrix, square, embed, TOKENS, of))


def _server_faults() -> dict[str, Causes]:
    from tests.rl.server_faults import SERVER_FAULTS

    own = {name: fault.causes or ("error",) for name, fault in SERVER_FAULTS.items()}
    return own | {n: (fault.cause,) for n, fault in _of_llama().items() if n not in own}


def _on_servers(form: str, replicas: int) -> Callable[[str, Sequence[str]], None]:
    def run(setting: str, names: Sequence[str]) -> None:
        from tests.rl.served_weights import saved, serving, small_model
        from tests.rl.sync_drill.toys import bits

        from servanda.errors import MeasurementError
        from servanda.rl import preflight

        with (
            tempfile.TemporaryDirectory() as folder,
            serving(saved(small_model(), Path(folder)), form, replicas) as urls,
        ):
            for name in names:
                module = small_model()
                before = bits(module)
                try:
                    found = preflight(_served(module, urls, form, name))
                    said = of_preflight(found, bits(module) == before)
                except MeasurementError as error:
                    said = _refused(str(error), name) | {"bits": bits(module) == before}
                keep(setting, name, "preflight", **said)

    return run


def _served(module: Any, urls: Sequence[str], form: str, name: str) -> Any:
    """A trainee of some servers, of which the second one, or the only one, has the fault."""
    from tests.rl.served_weights import TIMEOUT_S, begun, trained
    from tests.rl.server_faults import SERVER_FAULTS
    from tests.rl.sync_drill.broken import Copies

    bad, others = urls[len(urls) // 2], [*urls]
    others.remove(bad)
    for url in urls:
        begun(url, name if url == bad and name in SERVER_FAULTS else "none")
    asked: Any = urls if others else bad
    if name in SERVER_FAULTS:
        patience_s = HANGS_S if name == "hangs" else TIMEOUT_S
        return trained(module, asked, form, timeout_s=patience_s)
    copies = Copies(module, _of_llama()[name].take)
    syncs = [trained(copies.models[0], bad, form).sync]
    syncs += [trained(module, others, form).sync] if others else []

    def sync() -> None:
        copies.sync()
        for one in syncs:
            one()

    return trained(module, asked, form, sync=sync)


def _refused(text: str, name: str) -> Row:
    """An error is the right end of a drill where the fault's own words are in it."""
    from tests.rl.server_faults import SERVER_FAULTS

    known = SERVER_FAULTS[name].error if name in SERVER_FAULTS else ""
    if known and known in text:
        return {"outcome": "error", "cause": "error", "where": known}
    return {"outcome": "error", "cause": "", "where": text.splitlines()[0][:120]}


def _follow_faults() -> dict[str, Causes]:
    from tests.rl.follow_faults import CAUSES

    return {"none": ("",)} | {name: (cause or "part",) for name, cause in CAUSES.items()}


def _replica_faults() -> dict[str, Causes]:
    return {n: ("stale_replicas",) if n != "none" else ("",) for n in _follow_faults()}


def _following(replicas: int) -> Callable[[str, Sequence[str]], None]:
    def run(setting: str, names: Sequence[str]) -> None:
        from tests.rl.follow_faults import BROKEN, followed

        from benchmarks.follow import recorded

        for name in names:
            scores = recorded(BROKEN[-1] if name == "adapter_scaled" else BROKEN[0], RUNS)
            fault = "" if name == "none" else name
            parts = "always" if scores.parts and replicas == 1 else ""
            steps = followed(scores, fault, replicas=replicas, parts=parts)
            red = [step for step in steps if step.outcome == "violated"]
            last = next((s for s in reversed(red) if s.cause not in UNNAMED), steps[-1])
            where = f"violated from sync {red[0].version}" if red else ""
            keep(setting, name, "follow", outcome=last.outcome, cause=last.cause, where=where)

    return run


def _delta_faults(kind: str) -> Callable[[], dict[str, Causes]]:
    def faults() -> dict[str, Causes]:
        from tests.rl.delta_syncs import CASES, FAULTS

        healthy: dict[str, Causes] = {f"none {seed}": ("",) for seed in range(DELTA_SEEDS)}
        return healthy | {fault: FAULTS[fault].causes for of, fault in CASES if of == kind}

    return faults


def _on_deltas(kind: str) -> Callable[[str, Sequence[str]], None]:
    def run(setting: str, names: Sequence[str]) -> None:
        from tests.rl.delta_syncs import subject

        for name in names:
            healthy = name.startswith("none ")
            fault, seed = ("", int(name.split()[1])) if healthy else (name, 0)
            trainee, _ = subject(kind, fault, seed)
            keep(setting, name, "preflight", **_drilled(trainee))

    return run


def _drilled(trainee: Any) -> Row:
    """The row of a drill in this process."""
    from tests.rl.sync_drill.toys import bits

    from servanda.errors import MeasurementError
    from servanda.rl import preflight

    before = bits(trainee.module)
    try:
        found = preflight(trainee)
        return of_preflight(found, bits(trainee.module) == before)
    except MeasurementError as error:
        known = "error" if "logprob of nan" in str(error) else ""
        said = {"outcome": "error", "cause": known, "where": str(error).splitlines()[0][:120]}
        return said | {"bits": bits(trainee.module) == before}


def _followed_deltas() -> dict[str, Causes]:
    from tests.rl.delta_syncs import FAULTS, FOLLOWED, KINDS

    healthy: dict[str, Causes] = {f"none {kind}": ("",) for kind in KINDS}
    return healthy | {name: FOLLOWED.get(name, ("no name",)) for name in FAULTS}


def _following_deltas(setting: str, names: Sequence[str]) -> None:
    """The whole fleet is asked at one address."""
    import torch
    from tests.rl.delta_syncs import FAULTS, Fleet, model_of
    from tests.rl.follow_faults import Run, updates

    from servanda.rl import Follow
    from servanda.rl.follow.sent_weights import SentWeights

    for name in names:
        healthy = name.startswith("none ")
        kind, fault = (name[5:], "") if healthy else (FAULTS[name].kind, name)
        module = model_of(kind, fault, small=False)
        fleet, sent = Fleet(module, kind, fault), SentWeights(module, "bfloat16")
        follow = Follow(module)
        steps = [follow.observe(0, sent(follow.probes), fleet.score(follow.probes))]
        # adapters, and random weights, take larger steps
        rate = 3e-4 if kind == "low rank" or "expert" in fault else 3e-5
        if fault == "NaN on grouped experts":  # one expert is never routed to
            for weight in (p for p in module.parameters() if p.dim() == 3):
                weight.register_hook(lambda g: torch.cat([g[:-1], torch.zeros_like(g[-1:])]))
        for k in updates(module, Run("llama", steps=12, rate=rate)):
            fleet.sync()
            found = fleet.score(follow.probes)
            steps.append(follow.observe(k + 1, sent(follow.probes), found))
        red = [step for step in steps if step.outcome in ("violated", "error")]
        where = f"{red[0].outcome} from sync {red[0].version}" if red else ""
        last = red[-1] if red else steps[-1]
        cause = "error" if last.outcome == "error" else last.cause
        keep(setting, name, "follow", outcome=last.outcome, cause=cause, where=where)


# of each fault of tests/rl/unseen_syncs.py, by its own words and before the first run
UNSEEN: dict[str, Causes] = {
    "sparse_gap_bytes": ("sparse_updates", "misplaced", "not_repaired"),
    "shadow_buffer": ("dropped", "not_repaired"),
    "redundant_experts": ("experts_stale", "stale_replicas"),
    "lora_rank_pattern": ("scaled",),
    "fused_scale": ("scaled", "wrong_cast"),
    "folded_norms": ("late", "dropped"),
    "restarted_replica": ("stale_replicas",),
    "latest_by_text": ("stopped",),
    "bias_of_each_rank": ("scaled", "sync_moves"),
    "buffers_after_sleep": ("sync_moves",),
}


def _unseen() -> dict[str, Causes]:
    from tests.rl.unseen_syncs import CASES

    return {case.name: UNSEEN.get(case.name, ("",)) for case in CASES}


def _on_unseen(setting: str, names: Sequence[str]) -> None:
    from tests.rl.unseen_syncs import CASES

    for case in CASES:
        if case.name in names:
            keep(setting, case.name, "preflight", **_drilled(case.make()))


def _trl_faults() -> dict[str, Causes]:
    from tests.rl.sync_drill.drills import CALLED

    from servanda.engines.faults.sync import SYNC_FAULTS

    values = [*SYNC_FAULTS, *OTHER_VALUES]
    names = {value: value.split()[0] for value in values}
    healthy: dict[str, Causes] = {"none": ("",), "none, LoRA": ("",)}
    return healthy | {value: (CALLED.get(name, name),) for value, name in names.items()}


OTHER_VALUES = (
    *("one_layer 0", "one_layer 3", "one_mlp 0", "one_norm 3", "norm_class_stale input_layernorm"),
    *("wrong_cast float8_e5m2", "rows_stale 0.0625", "late 2", "dropped 3", "scaled 1.1"),
)


def _on_trl(setting: str, names: Sequence[str]) -> None:
    _printed(setting, str(SCRIPTS / "trl_drills.py"), *names)


def _on_zero3(setting: str, names: Sequence[str]) -> None:
    ranks = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
    _printed(setting, *ranks, str(SCRIPTS / "zero3_drills.py"), "gathered", *names)


def _printed(setting: str, *arguments: str) -> None:
    """Keep the rows that a script for the Python of TRL prints."""
    command = [str(TRL), "-W", "ignore", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith('{"fault"'):
                keep(setting, detector="preflight", **json.loads(line))
    if process.returncode:
        raise SystemExit(f"{setting}: the drills ended with exit code {process.returncode}")


SETTINGS = {
    "FSDP2, 2 processes": Setting(_sharded_faults, _on_ranks(2)),
    "FSDP2, 4 processes": Setting(_sharded_faults, _on_ranks(4)),
    "ZeRO-3, 2 processes": Setting(_sharded_faults, _on_zero3),
    "vLLM's endpoints": Setting(_server_faults, _on_servers("vllm", 1)),
    "SGLang's endpoints": Setting(_server_faults, _on_servers("sglang", 1)),
    "one replica of three": Setting(_server_faults, _on_servers("vllm", 3)),
    "TRL": Setting(_trl_faults, _on_trl),
    **{f"differences: {k}": Setting(_delta_faults(k), _on_deltas(k)) for k in DELTAS},
    "unseen": Setting(_unseen, _on_unseen),
    "follow, differences": Setting(_followed_deltas, _following_deltas),
    "follow": Setting(_follow_faults, _following(1)),
    "follow, one replica of eight": Setting(_replica_faults, _following(8)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--setting", action="append", choices=[*SETTINGS], help="default: all")
    parser.add_argument("--faults", default="", help="names, with commas; default: all")
    parser.add_argument("--write", action="store_true", help="the page from the kept rows, no run")
    asked = parser.parse_args()
    if asked.write:
        from benchmarks import sync_matrix_page

        sync_matrix_page.DOCS.write_text(sync_matrix_page.page(rows()), encoding="utf-8")
        return
    for name in asked.setting or SETTINGS:
        done = {row["fault"] for row in rows() if row["setting"] == name}
        wanted = asked.faults.split(",") if asked.faults else SETTINGS[name].faults()
        left = [fault for fault in wanted if fault not in done]
        if left and (TRL.exists() or SETTINGS[name].run not in (_on_trl, _on_zero3)):
            SETTINGS[name].run(name, left)


if __name__ == "__main__":
    main()
