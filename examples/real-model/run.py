"""A real language model: what bfloat16 costs, and a fault of long prompts.

    make demo-real      ten minutes on two cores

The first comparison is of bfloat16 with float32, on the prompts of this folder.  In the second the
bfloat16 kernel also keeps its position ids in bfloat16, so that they are wrong from position 257
on: its prompts have six of 300 to 350 tokens among them.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import runpy
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from servanda.contract.kernel_string import parse_kernel
from servanda.engines import engine_names, open_engine

ROOT = Path(__file__).parents[2]
SHORT = Path(__file__).parent / "prompts.jsonl"
LONG_TOKENS = (300, 310, 320, 330, 340, 350)


@dataclass(frozen=True)
class Compared:
    name: str
    kernel: str
    long: bool  # whether long prompts are among its prompts
    sequences: int
    code: int  # of the command, as expected
    says: str


RUNS = (
    Compared("bfloat16", "@bfloat16,attention=sdpa", False, 128, 0, "agrees to bfloat16 rounding"),
    Compared(
        "positions",
        "@bfloat16,attention=sdpa,fault=bf16_positions",
        True,
        64,
        1,
        "slice on prompt_tokens>=64",
    ),
)


def write_prompts(model: str, file: Path) -> None:
    """The short prompts of this folder, and long ones by the generator of examples/long."""
    made = runpy.run_path(str(ROOT / "examples" / "long" / "prompts.py"))["prompt"]
    engine: Any = open_engine(parse_kernel(f"transformers:{model}", engines=engine_names()))
    short = SHORT.read_text(encoding="utf-8").splitlines()
    long = [
        made("retrieval", tokens, lambda text: engine.encode([text])[0], seed)
        for seed, tokens in enumerate(LONG_TOKENS)
    ]
    engine.close()
    lines = [json.loads(line) for line in short]
    lines += [{**line, "labels": {"domain": "chat"}} for line in long]
    random.Random(0).shuffle(lines)
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")


def compared(run: Compared, model: str, long: Path, out: Path) -> bool:
    """Run `servanda compare`, show it, write its report; whether it says what is expected."""
    words = ["compare", f"transformers:{model}@float32", f"transformers:{model}{run.kernel}"]
    prompts = long if run.long else os.path.relpath(SHORT)
    words += ["--prompts", str(prompts), "--sequences", str(run.sequences)]
    words += ["--run-dir", str(out / run.name), "--fresh"]
    print(f"$ servanda {' '.join(words)}", flush=True)
    command = [sys.executable, "-m", "servanda"]
    with subprocess.Popen([*command, *words], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = ""
        for line in process.stdout:
            print(line, end="", flush=True)
            said += line
    report = [*command, "tools", "report", str(out / run.name), "-o", str(out / f"{run.name}.html")]
    subprocess.run(report, check=True)
    print(f"\n$ echo $?\n{process.returncode}\n", flush=True)
    return process.returncode == run.code and run.says in said


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--model", default=".venvs/real-model/float32")
    options.add_argument("--out", type=Path, default=Path("runs/real-model"))
    given = options.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    long = given.out / "prompts.jsonl"
    write_prompts(given.model, long)
    wrong = [run.name for run in RUNS if not compared(run, given.model, long, given.out)]
    if wrong:
        sys.exit(f"not what this demo expects: {', '.join(wrong)}")
    print("bfloat16 is as far off as its format, and holds; wrong positions are farther off.")
    print(f"reports {', '.join(str(given.out / f'{run.name}.html') for run in RUNS)}")


if __name__ == "__main__":
    main()
