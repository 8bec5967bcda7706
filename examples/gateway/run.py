# A gateway that keeps a contract: one slice of the traffic goes wrong half-way, leaves the kernel
# that serves it badly, and comes back once that is mended; the others never notice.
#
#   python run.py              five minutes on two cores
#
# Nothing here sleeps and hopes: what is waited for is asked of `GET /v1/status`.  Whatever is
# started here is ended here, by Ctrl-C as well.

from __future__ import annotations

import argparse
import contextlib
import json
import re
import secrets
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CONTRACT = HERE / "tiny-int8.kernelcontract.yaml"
PROMPTS = ROOT / "data" / "prompts.jsonl"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
USERS = 40
BROKEN = "code"  # the domain whose requests go wrong
FAULT = {"int4": True}  # of its kernel's weights, which goes on saying 8
SOUND = 30  # scored requests of every domain, before it does
MORE = 15  # and after each change
DOMAINS = ("prose", "json", "arith", "code")
DARK = "--blink-settings=preferredColorScheme=0"
LIMIT_S = 300.0  # of any one wait
PAUSE_S = 0.5  # between two questions
Status = dict[str, Any]


def said(text: str = "") -> None:
    print(text, flush=True)


@contextlib.contextmanager
def running(*words: str, cwd: Path | None = None, **more: Any) -> Iterator[subprocess.Popen[str]]:
    """A program of ours, which ends with the block: asked first, and then made to."""
    process = subprocess.Popen(
        [sys.executable, *words],
        stdout=subprocess.PIPE,
        text=True,
        cwd=cwd,
        start_new_session=True,  # Ctrl-C is for run.py, which ends the others
        **more,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
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
        yield url


def model(folder: Path) -> Path:
    """The shipped model, with a template for chats: what was said, and nothing around it."""
    copy = folder / "model" / "tiny-lm"
    shutil.copytree(ROOT / "models" / "tiny-lm", copy)
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    (copy / "chat_template.jinja").write_text(template)
    return copy


def contract(folder: Path, stable: str, infer: str) -> Path:
    """The contract, with the servers of this run in it."""
    text = CONTRACT.read_text()
    for old, new in (
        ("http://127.0.0.1:8001", infer),
        ("http://127.0.0.1:8002", stable),
        ("../../", f"{ROOT}/"),
    ):
        assert old in text, old
        text = text.replace(old, new)
    copy = folder / CONTRACT.name
    copy.write_text(text)
    return copy


def keys(folder: Path) -> tuple[Path, list[str], str]:
    """A file of keys: one of each user, and one to look on with."""
    users = [secrets.token_urlsafe(24) for _ in range(USERS)]
    ana = secrets.token_urlsafe(24)
    lines = [f'- {{name: user-{n}, role: client, key: "{key}"}}\n' for n, key in enumerate(users)]
    file = folder / "keys.yaml"
    file.touch(0o600)
    file.write_text("".join([f'- {{name: ana, role: operator, key: "{ana}"}}\n', *lines]))
    (folder / "users.json").write_text(json.dumps(users))
    return file, users, ana


@dataclass
class Gateway:
    """`servanda serve`, as it runs: its lines are shown as they come."""

    process: subprocess.Popen[str]
    url: str = ""
    page: str = ""
    key: str = ""
    lines: list[str] = field(default_factory=list)
    known: threading.Event = field(default_factory=threading.Event)

    def listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            said(f"  | {line.rstrip()}")
            self.lines.append(line)
            words = line.split()
            url = next((word for word in words if word.startswith("http://")), "")
            if line.startswith("page "):
                self.page = url.rstrip("/")
            elif line.startswith("serving users at"):
                self.url = url.rstrip(",").removesuffix("/v1")
            if self.url and self.page:  # users may ask before there is a leader
                self.known.set()
        self.known.set()

    def status(self) -> Status:
        return self.get("/v1/status").json()

    def get(self, path: str) -> httpx2.Response:
        headers = {"authorization": f"Bearer {self.key}"}
        return httpx2.get(f"{self.page}{path}", headers=headers, timeout=30).raise_for_status()

    def until(self, what: str, met: Callable[[Status], bool]) -> Status:
        """The status at which it is so."""
        end = time.monotonic() + LIMIT_S
        while time.monotonic() < end:
            if self.process.poll() is not None:
                sys.exit("servanda serve has ended")
            status = self.status()
            if met(status):
                return status
            time.sleep(PAUSE_S)
        sys.exit(f"after {LIMIT_S:g} s it is not so: {what}\n{json.dumps(status, indent=1)}")

    def picture(self, file: Path, *options: str) -> None:
        """The page, as a browser shows it; nothing where there is no browser."""
        browser = next(filter(None, map(shutil.which, BROWSERS)), None)
        if browser is None:
            said("  no browser is installed: no picture")
            return
        line = [browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        line += ["--disable-dev-shm-usage", "--window-size=1280,800", *options]
        with tempfile.TemporaryDirectory() as folder:
            # every user of the machine reads the arguments of a browser: it gets no key
            copy = Path(folder) / "page.html"
            style = f"<style>{self.get('/assets/page.css').text}</style>"
            page = re.sub(r"<link rel=.stylesheet.[^>]*>", lambda _: style, self.get("/").text)
            copy.write_text(page, encoding="utf-8")
            line += [f"--screenshot={file}", copy.as_uri()]
            subprocess.run(line, check=True, stderr=subprocess.DEVNULL, timeout=60)
        said(f"  picture {file.name}")


def name_of(domain: str) -> str:
    return f"domain={domain}"


def slices(status: Status) -> dict[str, Status]:
    return {one["name"]: one for one in status["slices"]}


def go_wrong(infer: str, domain: str | None) -> None:
    """Let the requests of a domain be answered by another kernel; None: let it be sound again."""
    at = f"{infer}/servanda/misbehave"
    if domain is None:
        httpx2.delete(at, timeout=60).raise_for_status()
    else:
        body = {"kind": "kernel", "fault": FAULT, "when": {"domain": domain}}
        httpx2.post(at, json=body, timeout=60).raise_for_status()


def met(file: Path, begin: float, end: float) -> list[dict[str, Any]]:
    """What users met whose request began within a time."""
    lines = file.read_text().splitlines() if file.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("}")]
    return [row for row in rows if begin <= row["at"] < end]


def table(rows: list[list[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        said(("  " + "  ".join(cells)).rstrip())
    said()


def by_domain(file: Path, phases: Mapping[str, tuple[float, float]]) -> None:
    """Who answered, and how long it took: of every domain in every phase."""
    rows = [["domain", *phases]]
    for domain in DOMAINS:
        cells = [domain]
        for begin, end in phases.values():
            found = [row for row in met(file, begin, end) if row["domain"] == domain]
            times = [row["seconds"] for row in found if row["status"] == 200]
            by_infer = sum(row["pool"] == "infer" for row in found)
            middle = f"{1000 * statistics.median(times):.0f} ms" if times else "-"
            share = f"{100 * by_infer / len(found):.0f} %" if found else "-"
            cells.append(f"{len(found)} sent, infer {share}, {middle}")
        rows.append(cells)
    table(rows)


def moves(status: Status, began: float) -> None:
    """The changes, with the evidence of those that evidence made."""
    names = ("log_evidence", "log_price", "value", "limit")
    head = ["at", "slice", "from", "to", "requests", "users"]
    rows = [[*head, "log e", "threshold", "value", "limit", "why"]]
    for one in status["transitions"]:
        by_evidence = one["log_evidence"] is not None
        rows.append(
            [
                f"{one['at'] - began:.0f} s",
                *(one[name] for name in ("slice", "before", "after")),
                *(str(one[name]) if by_evidence else "" for name in ("n", "keys")),
                *("" if one[name] is None else f"{one[name]:.3g}" for name in names),
                one["reason"],
            ]
        )
    table(rows)
    said("  log e: log e-value, nats; threshold: its alarm or return threshold, nats.")
    said("  requests, users: scored so far, and their distinct users.")
    said("  value, limit: the share of tokens beyond what the clause says\n")


@dataclass
class Run:
    """The run, phase by phase: sound, faulty, diverted, repaired, returned."""

    gateway: Gateway
    infer: str
    out: Path
    times: dict[str, float] = field(default_factory=dict)

    def begins(self, phase: str, what: str) -> None:
        self.times[phase] = time.time()
        said(f"\n[{self.times[phase] - self.times['sound']:.0f} s] {what}")

    def of(self, phase: str) -> tuple[float, float]:
        names = [*self.times]
        after = names.index(phase) + 1
        return self.times[phase], self.times[names[after]] if after < len(names) else time.time()

    def tell(self) -> bool:
        """All of it; whether it went as it had to."""
        broken, gateway = name_of(BROKEN), self.gateway
        self.begins("sound", "users begin to send requests")
        status = gateway.until("every domain has evidence", everybody_sound)
        before = slices(status)[broken]["scored"]

        go_wrong(self.infer, BROKEN)
        self.begins("faulty", f"infer now serves {broken} with {FAULT}, without reporting it")
        gateway.until(f"{broken} is quarantined", lambda s: status_of(s, broken) == "quarantined")
        self.begins("diverted", f"{broken} is served by stable")
        away = slices(gateway.status())
        self.gateway.picture(self.out / "quarantined.png")
        self.gateway.picture(self.out / "quarantined_dark.png", DARK)
        gateway.until("the others go on being scored", lambda s: gone_on(away, slices(s), broken))

        go_wrong(self.infer, None)
        self.begins("repaired", "the infer kernel is repaired")
        gateway.until(f"{broken} recovers", lambda s: status_of(s, broken) == "recovering")
        status = gateway.until(f"{broken} is active", lambda s: status_of(s, broken) == "active")
        self.begins("returned", f"{broken} is served by infer again")
        back = slices(status)
        status = gateway.until("all go on", lambda s: gone_on(back, slices(s), ""))
        self.gateway.picture(self.out / "recovered.png")
        self.times["end"] = time.time()
        return self.judged(status, before)

    def judged(self, status: Status, before: int) -> bool:
        broken, users = name_of(BROKEN), self.out / "users.jsonl"
        said("\nWhat was decided")
        moves(status, self.times["sound"])
        said("Users: requests, share of the infer kernel, and the median time of a response")
        by_domain(users, {phase: self.of(phase) for phase in [*self.times][:-1]})
        left = next(one for one in status["transitions"] if one["after"] == "quarantined")
        late = left["at"] - self.times["faulty"]
        said(
            f"{broken} was diverted {late:.1f} s after the fault began, on {left['n'] - before} "
            f"scored requests of {left['keys']} users"
        )
        rows = met(users, 0, float("inf"))
        failed = [row for row in rows if row["status"] != 200]
        away = [row for row in met(users, *self.of("diverted")) if row["domain"] == BROKEN]
        others = [row for row in rows if row["domain"] != BROKEN]
        right = {
            "every request was answered": not failed,
            f"stable served {broken} while it was diverted": (
                {row["pool"] for row in away} <= {"stable"}
            ),
            "infer answered all others": {row["pool"] for row in others} == {"infer"},
            "no other slice moved": {t["slice"] for t in status["transitions"]} == {broken},
        }
        for what, is_so in right.items():
            said(f"  {'✓' if is_so else '✗'} {what}")
        return all(right.values())


def status_of(status: Status, name: str) -> str:
    return slices(status)[name]["status"]


def everybody_sound(status: Status) -> bool:
    found = [slices(status).get(name_of(domain)) for domain in DOMAINS]
    return all(one and one["status"] == "active" and one["scored"] >= SOUND for one in found)


def gone_on(before: Mapping[str, Status], now: Mapping[str, Status], but: str) -> bool:
    names = [name_of(domain) for domain in DOMAINS if name_of(domain) != but]
    return all(now[name]["scored"] >= before[name]["scored"] + MORE for name in names)


def verified(out: Path) -> bool:
    said("\n$ servanda promotion ledger verify")
    line = [
        sys.executable,
        "-m",
        "servanda",
        "promotion",
        "ledger",
        "verify",
        "--ledger",
        str(out / "ledger.db"),
    ]
    return subprocess.run(line, check=False).returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description="A gateway that keeps a contract.")
    parser.add_argument("--out", type=Path, default=Path("runs/gateway"), help="a folder")
    out = parser.parse_args().out.resolve()
    if out.exists():
        parser.error(f"{out} exists: remove it, or name another folder with --out")
    out.mkdir(parents=True)
    file, _, ana = keys(out)
    kernel = f"transformers:{model(out)}@bfloat16"
    more = "attention=sdpa,batch_size=16"
    with contextlib.ExitStack() as stack:
        stable = stack.enter_context(serving(f"{kernel},{more}"))
        broken = serving(f"{kernel}+int8_weight_only,{more}", "--test-mode")
        infer = stack.enter_context(broken)
        words = ["serve", contract(out, stable, infer).name, "--keys", file.name]
        words += ["--state", "state", "--ledger", "ledger.db", "--log", "log", "--show-pool"]
        said(f"$ servanda {shlex.join(words)}")
        words += ["--name", "demo", "--port", "0", "--admin", "127.0.0.1:0"]
        serve = stack.enter_context(running("-m", "servanda", *words, cwd=out))
        gateway = Gateway(serve, key=ana)
        threading.Thread(target=gateway.listen, daemon=True).start()
        gateway.known.wait(LIMIT_S)
        if not gateway.url:
            sys.exit("servanda serve did not start")
        given = ["--gateway", gateway.url, "--prompts", str(PROMPTS)]
        given += ["--keys", str(out / "users.json"), "--out", str(out / "users.jsonl")]
        stack.enter_context(running(str(HERE / "users.py"), *given))
        right = Run(gateway, infer, out).tell()
    return 0 if verified(out) and right else 1


def _ended(*_: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _ended)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
