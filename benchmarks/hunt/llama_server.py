# A llama-server under other flags, beside one that has none of them: the largest difference of a
# logprob among the likeliest 64, in nats, over the tokens that both generate greedily alike.
#
#     python -m benchmarks.hunt.llama_server OUT.json

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from scripts import servers

from benchmarks.hunt.survey import sorted_by_outcome

MODEL = "tiny-lm"
EXACT = ("-fa", "off", "-ctk", "f32", "-ctv", "f32", "-b", "512", "-ub", "512")
TEXT = [(37 * i * i + 11 * i + 5) % 900 + 20 for i in range(96)]
NEW = 24
Answer = list[dict[int, float]]  # of each new token the likeliest ids with their logprobs


def ask(url: str, ids: Sequence[int], **options: Any) -> Answer:
    """What the server generates greedily after `ids`."""
    body = {
        "prompt": [*ids],
        "n_predict": NEW,
        "temperature": 0.0,
        "n_probs": 64,
        "seed": 1,
        "ignore_eos": True,
        "cache_prompt": False,
        **options,
    }
    request = urllib.request.Request(
        f"{url}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as reply:
        tokens = json.load(reply)["completion_probabilities"]
    return [{t["id"]: t["logprob"] for t in token["top_logprobs"]} for token in tokens]


def apart(one: Answer, other: Answer) -> float:
    """Up to the first other token; an id that one side does not list has at most its last."""
    most = 0.0
    for a, b in zip(one, other, strict=True):
        for i in {*a, *b}:
            most = max(most, abs(a.get(i, min(a.values())) - b.get(i, min(b.values()))))
        if max(a, key=a.__getitem__) != max(b, key=b.__getitem__):
            break
    return most


def plain(url: str) -> Answer:
    return ask(url, TEXT)


def warm(url: str) -> Answer:
    ask(url, TEXT[:70], cache_prompt=True)
    return ask(url, TEXT, cache_prompt=True)


def after_another_end(url: str) -> Answer:
    ask(url, [*TEXT[:70], *reversed(TEXT[70:])], cache_prompt=True)
    return ask(url, TEXT, cache_prompt=True)


def in_company(url: str) -> Answer:
    texts = [TEXT, *(TEXT[n:] for n in (3, 11, 40))]
    with ThreadPoolExecutor(len(texts)) as pool:
        return next(iter([*pool.map(lambda ids: ask(url, ids), texts)]))


def without_its_middle(url: str) -> Answer:
    ask(url, [*TEXT[:40], *range(300, 340), *TEXT[40:]], cache_prompt=True)
    return ask(url, TEXT, cache_prompt=True)


WAYS: dict[str, tuple[Sequence[str], Callable[[str], Answer]]] = {
    "again": ((), plain),
    "flash attention": (("-fa", "on"), plain),
    "batches of 16": (("-b", "16", "-ub", "16"), plain),
    "physical batches of 7": (("-ub", "7"), plain),
    "unified KV": (("-kvu", "-np", "4"), plain),
    "unified KV, in company": (("-kvu", "-np", "4"), in_company),
    "split KV, in company": (("-no-kvu", "-np", "4"), in_company),
    "warm prefix": ((), warm),
    "warm prefix, another end": ((), after_another_end),
    "warm prefix, flash attention": (("-fa", "on"), warm),
    "warm prefix, unified KV": (("-kvu", "-np", "4"), warm),
    "no weight repacking": (("--no-repack",), plain),
    "KV in f16": (("-ctk", "f16", "-ctv", "f16"), plain),
    "KV in q8_0, flash attention": (("-fa", "on", "-ctk", "q8_0", "-ctv", "q8_0"), plain),
    "reuse after a cut": (("--cache-reuse", "8"), without_its_middle),
}


def measured() -> dict[str, float | str]:
    found: dict[str, float | str] = {}
    with tempfile.TemporaryDirectory() as place:
        gguf = Path(place) / "model.gguf"
        subprocess.run(servers.gguf_command(gguf, "f32"), check=True)
        exact: Answer | None = None
        for way, (flags, run) in WAYS.items():
            port = servers.free_port()
            command = [*servers.llama_command(port, gguf), *EXACT, *flags]
            try:
                with servers.running(command, port, Path(place) / "log") as url:
                    exact = exact or plain(url)
                    found[way] = float(f"{apart(run(url), exact):.3g}")
            except Exception as error:
                found[way] = f"{type(error).__name__}: {str(error)[:90]}"
    return found


if __name__ == "__main__":
    python = servers.VENVS / "llamacpp" / "bin" / "python"
    asked = "from importlib.metadata import version as v; print(v('llama-cpp-python'))"
    command = [python, "-c", asked]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    rows = {MODEL: sorted_by_outcome(measured())}
    report = {"versions": {"llama-cpp-python": shown}, "rows": rows}
    Path(sys.argv[1]).write_text(json.dumps(report, indent=1), encoding="utf-8")
