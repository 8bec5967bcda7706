# A promotion from offline to full, on what real servers answer; and four that are stopped.
#
#   python run.py                        the good build: it completes
#   python run.py --faulty-at canary     a build that goes wrong there, and says nothing of it
#   python run.py --all                  the good one and the four faulty ones, into one ledger
#
# Whatever is started here is ended here, by Ctrl-C as well.

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CONTRACT = HERE / "tiny-int8.kernelcontract.yaml"
MODEL = ROOT / "models" / "tiny-lm"
STABLE = f"transformers:{MODEL}@bfloat16,attention=sdpa,batch_size=16"
INFER = f"transformers:{MODEL}@bfloat16+int8_weight_only,attention=sdpa,batch_size=16"
STAGES = ("offline", "shadow", "canary", "full")
FAULT = {"int4": True}  # its weights have 4 bits from then on, and it goes on saying 8
LIMIT_S = 1800  # of one promotion


@dataclass(frozen=True)
class Scenario:
    """One promotion: of the good build, or of one that goes wrong when a stage begins."""

    faulty_at: str | None
    folder: Path
    ledger: str

    @property
    def name(self) -> str:
        return f"faulty-at-{self.faulty_at}" if self.faulty_at else "good"

    def prepare(self, stable: str, infer: str) -> None:
        """A folder with the contract, under a name of its own, and what sets its route.

        The faulty builds say to be the good one, and a build has one run: so each is promoted
        under a contract of its own name, as in five services.
        """
        self.folder.mkdir(parents=True)
        text = CONTRACT.read_text()
        for old, new in (
            ("name: tiny-int8-promotion", f"name: tiny-int8-{self.name}"),
            ("http://127.0.0.1:8001", infer),
            ("http://127.0.0.1:8002", stable),
            ("../../", f"{ROOT}/"),
        ):
            assert old in text, old
            text = text.replace(old, new)
        (self.folder / CONTRACT.name).write_text(text)
        shutil.copy(HERE / "set_route.py", self.folder)

    def servanda(self, *words: str, show: bool = True) -> subprocess.CompletedProcess[str]:
        """A command of servanda, in the scenario's folder; all of them end in the same words."""
        tell = ["--command", f"{shlex.quote(sys.executable)} set_route.py route.json"]
        tell = tell if words[0] in ("promote", "approve") else []
        if show:
            said(f"$ servanda {shlex.join(words)} ...")
        where = [] if "--ledger" in words else ["--ledger", self.ledger]
        line = ("-m", "servanda", *words, *tell, *where)
        with running(*line, cwd=self.folder, end=signal.SIGINT) as process:
            out = process.communicate()[0]
        return subprocess.CompletedProcess(line, process.returncode, out)

    def route(self) -> str:
        """Who serves, as the proxy has it."""
        route = json.loads((self.folder / "route.json").read_text())
        mirrored = f", {100 * route['mirror']:g} % are mirrored to it" if route["mirror"] else ""
        return f"infer serves {100 * route['share']:g} % of the requests{mirrored}"


def said(text: str = "") -> None:
    print(text, flush=True)


@contextlib.contextmanager
def running(
    *words: str, cwd: Path | None = None, end: signal.Signals = signal.SIGTERM
) -> Iterator[subprocess.Popen[str]]:
    """A program of ours, which ends with the block: asked first, and then made to."""
    process = subprocess.Popen(
        [sys.executable, *words],
        stdout=subprocess.PIPE,
        text=True,
        cwd=cwd,
        start_new_session=True,  # Ctrl-C is for run.py, which ends the others
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(end)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


@contextlib.contextmanager
def serving(kernel: str, *more: str) -> Iterator[str]:
    """The URL of a server of a kernel, once it answers."""
    with running(
        "-m", "servanda", "tools", "serve-kernel", kernel, "--port", "0", *more
    ) as process:
        assert process.stdout is not None
        # the line that tells the port comes when requests are taken; none comes where it failed
        line = process.stdout.readline()
        url = next((word for word in line.split() if word.startswith("http://")), None)
        if url is None:
            sys.exit(f"{kernel} is not served")
        httpx2.get(f"{url}/health", timeout=60).raise_for_status()
        yield url


def promoted(scenario: Scenario, stable: str, infer: str) -> dict[str, Any]:
    """Take a scenario as far as it goes; what `servanda promote` says of it at the end."""
    scenario.prepare(stable, infer)
    began, wrong, shown = time.monotonic(), False, ("", "")
    with contextlib.ExitStack() as stack:
        traffic = None
        while True:
            leg = shown[0]
            if not wrong and scenario.faulty_at == (leg.split("-")[0] or "offline"):
                said(f"  from now on the build is faulty ({FAULT}), and says nothing of it")
                go_wrong(infer, FAULT)
                wrong = True
            if leg and leg != "offline" and traffic is None:
                said("  users come: python traffic.py ...")
                traffic = stack.enter_context(traffic_of(scenario, stable, infer))
            # a build that is to go wrong at a stage is stopped there for a moment
            until = "completed" if wrong or not scenario.faulty_at else scenario.faulty_at
            run = scenario.servanda(
                *("promote", CONTRACT.name, "--log", "served.jsonl", "--run-dir", "run"),
                *("--until", until, "--format", "json", "--quiet"),
                show=not leg,
            )
            if not run.stdout:
                sys.exit(f"servanda promote ended with exit code {run.returncode}")
            found = json.loads(run.stdout)
            settled = found["status"] not in ("running", "awaiting_evidence")
            if found["leg"] != shown[0] or (settled and found["status"] != shown[1]):
                said(f"\n[{time.monotonic() - began:.0f} s] {scenario.route()}")
                said(scenario.servanda("promotion", "status", found["run"], show=False).stdout)
            shown = (found["leg"], found["status"])
            if found["status"] == "awaiting_approval":
                reason = ("--reason", "everything held at half of the traffic")
                run = scenario.servanda(
                    "promotion", "approve", found["run"], "--actor", "ana", *reason
                )
            if found["status"] in ("completed", "rolled_back", "superseded", "halted"):
                found["seconds"] = time.monotonic() - began
                return found
            if time.monotonic() - began > LIMIT_S:
                sys.exit(f"{scenario.name} is {found['status']} after {LIMIT_S} s: {found['why']}")


def traffic_of(
    scenario: Scenario, stable: str, infer: str
) -> contextlib.AbstractContextManager[Any]:
    where = ("--route", "route.json", "--log", "served.jsonl")
    prompts = ("--prompts", str(ROOT / "data" / "prompts.jsonl"))
    script, servers = str(HERE / "traffic.py"), ("--stable", stable, "--infer", infer)
    return running(script, *servers, *prompts, *where, cwd=scenario.folder)


def go_wrong(infer: str, fault: Mapping[str, Any] | None) -> None:
    """Let the served kernel be another one than it says; None: let it be sound again."""
    at = f"{infer}/servanda/misbehave"
    if fault is None:
        httpx2.delete(at, timeout=60).raise_for_status()
    else:
        body = {"kind": "kernel", "fault": dict(fault)}
        httpx2.post(at, json=body, timeout=60).raise_for_status()


def concluded(scenario: Scenario, found: Mapping[str, Any]) -> bool:
    """Say how a promotion ended, and whether it is how it had to."""
    route = scenario.route()
    if scenario.faulty_at is None:
        right = found["status"] == "completed" and route.startswith("infer serves 100 %")
    else:
        stopped = found["status"] == "rolled_back" and found["stage"] == scenario.faulty_at
        right = stopped and route.startswith("infer serves 0 %")
    status = found["status"].replace("_", " ")
    said(f"{scenario.name}: {status} on {found['leg']} after {found['seconds']:.0f} s; {route}")
    decided = next(leg["decided"] for leg in found["legs"] if leg["leg"] == found["leg"])
    if decided:
        low, high = decided["low"], decided["high"]
        said(
            f"  decided by {decided['clause']} on {decided['slice']}: {decided['value']:.4f} in "
            f"[{low:.4f}, {high:.4f}], limit {decided['limit']:g}, n {decided['n']:,} "
            f"{decided['units']}"
        )
    said("" if right else "  THIS IS NOT HOW IT HAD TO END\n")
    return right


def verified(scenario: Scenario, out: Path) -> bool:
    """Whether the ledger is as it was written, and a copy with another byte is not."""
    sound = scenario.servanda("promotion", "ledger", "verify")
    said(sound.stdout)
    copy = out / "copy.jsonl"
    scenario.servanda("promotion", "ledger", "export", "-o", f"../{copy.name}")
    data = bytearray(copy.read_bytes())
    at = next(i for i in range(len(data) // 2, len(data)) if chr(data[i]).isdigit())
    said(f"  byte {at:,} of {len(data):,} is another digit from now on")
    data[at] ^= 1
    copy.write_bytes(data)
    edited = scenario.servanda("promotion", "ledger", "verify", "--ledger", f"../{copy.name}")
    said(edited.stdout)
    return sound.returncode == 0 and edited.returncode == 1


def main() -> int:
    parser = argparse.ArgumentParser(description="A promotion on real traffic.")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--faulty-at", choices=STAGES, help="a build that goes wrong there")
    which.add_argument("--all", action="store_true", help="the good build and four faulty ones")
    parser.add_argument("--out", type=Path, default=Path("runs/promotion"), help="a folder")
    parser.add_argument("--ledger", help="a file, or postgresql://...  [default: OUT/ledger.db]")
    given = parser.parse_args()
    out = given.out.resolve()
    if out.exists():
        parser.error(f"{out} exists: remove it, or name another folder with --out")
    out.mkdir(parents=True)
    ledger = given.ledger or str(out / "ledger.db")
    faults = (None, *STAGES) if given.all else (given.faulty_at,)
    scenarios = [Scenario(at, out / (f"faulty-at-{at}" if at else "good"), ledger) for at in faults]
    ended: list[bool] = []
    with serving(STABLE) as stable, serving(INFER, "--test-mode") as infer:
        for name, kernel, url in (("stable", STABLE, stable), ("infer ", INFER, infer)):
            said(f"{name} {kernel.replace(f'{ROOT}/', '')}\n       at {url}")
        said()
        for scenario in scenarios:
            go_wrong(infer, None)
            said(f"== {scenario.name}")
            ended.append(concluded(scenario, promoted(scenario, stable, infer)))
    ended.append(verified(scenarios[0], out))
    return 0 if all(ended) else 1


def _ended(*_: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _ended)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
