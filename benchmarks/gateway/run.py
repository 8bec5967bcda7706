"""CPU of the gateway beside a bare pass-through of the same stack, and beside LiteLLM.

The proxy under test has a core of its own; the fake upstream, the load and the leader share
another.  Measurements of a proxy and of the pass-through take turns, and a ratio is the median
over such pairs: what else the machine does then falls on both.

    python -m benchmarks.gateway.run [--pairs 7] [--only short stream] [--litellm BIN] [--write]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2

from benchmarks import committed
from benchmarks.assumptions import table
from benchmarks.gateway.deployment import KEYS, KEYS_FILE, Deployment, written
from benchmarks.gateway.running import (
    ROOT,
    Running,
    cores,
    free_port,
    listening,
    machine,
    python,
)

DOCS = ROOT / "docs" / "explanation" / "gateway_numbers.md"
FLOOR = "bare pass-through"
LITELLM = "LiteLLM proxy"
NOTHING, ONE_IN_100 = "gateway, nothing sampled", "gateway, 1 % sampled"
SAMPLED = {NOTHING: 0.0, ONE_IN_100: 0.01, "gateway, all sampled": 1.0}
LED = f"{ONE_IN_100}, led by a real leader that scores"
_LONGEST_S = 90.0  # of one measurement
_SLOW = {LITELLM: 3}  # pairs at most, of what takes ten times as long
RATE, TOKENS, STREAMS = 50.0, 100, 100
_CONFIG = """\
model_list:
  - model_name: fake
    litellm_params: {{model: openai/fake, api_base: "{base}/v1", api_key: none}}
litellm_settings: {{telemetry: false, num_retries: 0}}
general_settings: {{disable_spend_logs: true}}
"""


@dataclass(frozen=True)
class Case:
    """One way of loading a proxy."""

    name: str
    connections: int
    requests: int
    warm: int
    stream: bool = False

    def arguments(self) -> list[str]:
        found = ["--connections", self.connections, "--requests", self.requests]
        found += ["--warm", self.warm, "--tokens", TOKENS if self.stream else 16, "--chat"]
        return [str(part) for part in found] + (["--stream"] if self.stream else [])


SHORT = (Case("1 at a time", 1, 1500, 200), Case("32 at a time", 32, 4000, 500))
STREAM = (Case(f"{STREAMS} streams of {RATE:.0f} tokens/s", STREAMS, 200, 100, stream=True),)


def measured(case: Case, proxy: Running, few: float = 1.0) -> tuple[float, dict[str, Any]]:
    """CPU microseconds of one request, or of one event of a stream, and all that was found.

    Raises:
        RuntimeError: not every request was answered with 200.
        TimeoutExpired: it takes too long.
    """
    cut = Case(
        case.name,
        case.connections,
        max(case.connections, int(case.requests * few)),
        max(case.connections, int(case.warm * few)),
        case.stream,
    )
    command = ["taskset", "-c", str(cores()[1])]
    command += python("load", "--port", str(proxy.port), "--pid", str(proxy.pid))
    command += cut.arguments()
    done = subprocess.run(
        command, check=True, cwd=ROOT, capture_output=True, text=True, timeout=_LONGEST_S
    )
    found = json.loads(done.stdout)
    if set(found["statuses"]) != {"200"}:
        raise RuntimeError(f"{case.name}: answers were {found['statuses']}")
    per = found["events"] if case.stream else found["requests"]
    return 1e6 * found["cpu_s"][0] / per, found


def compared(
    cases: Sequence[Case], proxies: dict[str, Running], pairs: int, beside: str = FLOOR
) -> Iterator[tuple[str, ...]]:
    """A row for each load and proxy: CPU time, and its ratio to that of `beside`, pair by pair."""
    floor = proxies[beside]
    per = "event" if cases[0].stream else "request"
    yield ("load", "proxy", f"CPU by {per}", f"beside: {beside}", "p50", "p99")
    for case in cases:
        floors: list[float] = []
        rows = []
        for name, proxy in proxies.items():
            if name == beside:
                continue
            try:
                found = [paired(case, floor, proxy, name) for _ in range(of_pairs(name, pairs))]
            except subprocess.TimeoutExpired:
                rows.append((case.name, name, f"not done in {_LONGEST_S:.0f} s", "", "", ""))
                continue
            floors += [at_floor for at_floor, _, _ in found]
            ratios = [spent / at_floor for at_floor, spent, _ in found]
            ratio = f"{statistics.median(ratios):.2f} x ({min(ratios):.2f} to {max(ratios):.2f})"
            took = (statistics.median(all_[p] for *_, all_ in found) for p in ("p50_s", "p99_s"))
            own = micro(statistics.median(spent for _, spent, _ in found))
            rows.append((case.name, name, own, ratio, *(f"{1e3 * s:.2f} ms" for s in took)))
        yield (case.name, beside, micro(statistics.median(floors)) if floors else "", "1", "", "")
        yield from rows


def of_pairs(name: str, pairs: int) -> int:
    return min(pairs, _SLOW.get(name, pairs))


def paired(
    case: Case, floor: Running, proxy: Running, name: str
) -> tuple[float, float, dict[str, Any]]:
    """CPU at the floor, CPU of the proxy, and all that was found of it; one after the other."""
    few = 0.1 if name in _SLOW else 1.0
    at_floor, _ = measured(case, floor)
    return at_floor, *measured(case, proxy, few)


def micro(value: float) -> str:
    """Microseconds, three digits.

    >>> micro(12.345), micro(4567.8)
    ('12.3 µs', '4,568 µs')
    """
    return f"{value:,.1f} µs" if value < 100 else f"{value:,.0f} µs"


def started(stack: ExitStack, folder: Path, litellm: str | None, rate: float) -> dict[str, Running]:
    """An upstream and every proxy before it, each with a core given."""
    proxy_core, other_core = cores()

    def listen(name: str, module: str, *more: str, core: int = proxy_core) -> Running:
        port = free_port()
        command = python(module, "--port", str(port), *more)
        return stack.enter_context(listening(command, port, core, log=folder / f"{name}.log"))

    most = ["--least", str(TOKENS), "--most", str(TOKENS)] if rate else []
    upstream = listen("upstream", "upstream", "--rate", str(rate), *most, core=other_core)
    other = listen("other", "upstream", core=other_core)
    found = {FLOOR: listen("floor", "passthrough", "--upstream", upstream.url)}
    if not rate:
        bare = listen("bare", "passthrough", "--upstream", upstream.url, "--bare")
        found["bare pass-through without Starlette"] = bare
    to = ["--infer", upstream.url, "--stable", other.url]
    for name, chance in SAMPLED.items():
        leader = listen(f"leader {chance}", "stub", "--sample", str(chance), core=other_core)
        found[name] = listen(f"gateway {chance}", "proxy", *to, "--leader", leader.url)
    found[LED] = led(stack, folder / "led", upstream, other, lambda *m: listen("led", "proxy", *m))
    if litellm:
        config, port = folder / "litellm.yaml", free_port()
        config.write_text(_CONFIG.format(base=upstream.url))
        command = [litellm, "--config", str(config), "--port", str(port), "--host", "127.0.0.1"]
        env = {  # no look-up of prices, and no key: it is asked for none, as the gateway is not
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
            "LITELLM_LOG": "ERROR",
            "PYTHONPATH": "",
        }
        found[LITELLM] = stack.enter_context(
            listening(command, port, proxy_core, env, folder / "litellm.log")
        )
    return found


def led(
    stack: ExitStack,
    folder: Path,
    infer: Running,
    stable: Running,
    listen: Callable[..., Running],
) -> Running:
    """A gateway that follows a leader which scores what it is sent, on the other core."""
    contract = written(folder, infer=infer.url, stable=stable.url, sample=0.01, sample_near=0.01)
    port = free_port()
    command = [sys.executable, "-m", "servanda", "serve", str(contract), "--leader-only"]
    command += ["--admin", f"127.0.0.1:{port}", "--keys", str(folder / KEYS_FILE)]
    command += ["--state", str(folder / "state"), "--ledger", str(folder / "ledger.db")]
    env = {"OMP_NUM_THREADS": "1"}
    leader = stack.enter_context(
        listening(command, port, cores()[1], env, log=folder / "leader.log")
    )
    to = ["--infer", infer.url, "--stable", stable.url]
    gateway = listen(*to, "--leader", leader.url, "--leader-key", KEYS["gateway"])
    headers = {"authorization": f"Bearer {KEYS['viewer']}"}

    def follows() -> bool:
        status = httpx2.get(f"{leader.url}/v1/status", headers=headers).json()
        return any(one["version"] for one in status["gateways"])

    Deployment.until(follows, "the gateway does not follow its leader")
    return gateway


def version_of(litellm: str) -> str:
    told = "from importlib.metadata import version; print(version('litellm'))"
    python = Path(litellm).parent / "python"
    done = subprocess.run([python, "-c", told], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def tables(options: argparse.Namespace) -> Iterator[str]:
    for kind, cases in (("short", SHORT), ("stream", STREAM)):
        if kind not in options.only:
            continue
        yield {"short": "### Short requests", "stream": "### Streams"}[kind]
        with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
            rate = RATE if kind == "stream" else 0.0
            proxies = started(stack, Path(folder), options.litellm, rate)
            led = proxies.pop(LED)
            yield table([*compared(cases, proxies, options.pairs)])
            yield {"short": "### Sampling, short requests", "stream": "### Sampling, streams"}[kind]
            asked = {NOTHING: proxies[NOTHING], ONE_IN_100: proxies[ONE_IN_100], LED: led}
            yield table([*compared(cases, asked, options.pairs, NOTHING)])
    said = f" LiteLLM is version {version_of(options.litellm)}." if options.litellm else ""
    yield (
        f"{machine()}{said} Medians of {options.pairs} pairs (of LiteLLM {_SLOW[LITELLM]} at "
        "most), in brackets the whole range."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--only", nargs="+", choices=("short", "stream"))
    parser.add_argument("--litellm", help="the `litellm` command of an environment that has it")
    parser.add_argument("--write", action="store_true", help=f"into {DOCS.name}")
    options = parser.parse_args()
    options.only = options.only or ["short", "stream"]
    parts = []
    for part in tables(options):
        print(part, end="\n\n", flush=True)
        parts.append(part)
    if options.write:
        committed.write(DOCS, "\n\n".join(parts), "python -m benchmarks.gateway --write")


if __name__ == "__main__":
    main()
