"""`servanda bisect` beside SGLang's comparator and Polygraphy, on the same planted faults.

Each tool answers from two checkpoints: what it names, and the processor time of all its
processes, as a multiple of that of `servanda bisect` in the same run; medians of three runs.

    make bench-bisect
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from benchmarks import committed
from servanda.report.format import count

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "how-to" / "bisect.md"
BEGIN, END = "<!-- beside others -->", "<!-- end of others -->"
MODEL = ROOT / "models" / "tiny-lm"
SEQUENCES, LENGTH = 8, 48
RUNS = 3
UP, DOWN = "model.layers.1.mlp.up_proj", "model.layers.2.mlp.down_proj"
ROTARY = "model.rotary_emb"

Answer = tuple[str, str]  # the module that is named, and what the tool said of others
Tool = Callable[[Path, str, Path], Answer | None]


def rows_in_reverse(folder: Path) -> None:
    _reweigh(folder, f"{UP}.weight", lambda weight: weight.flip(0).contiguous())


def scaled(factor: float) -> Callable[[Path], None]:
    return lambda folder: _reweigh(folder, f"{DOWN}.weight", lambda weight: weight * factor)


def rotary_base(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = 5000.0
    (folder / "config.json").write_text(json.dumps(config))


def _reweigh(folder: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {name: change(tensors[name])}, file, metadata={"format": "pt"})


# what is planted, the dtype of B, and the module that is at fault
FAULTS = (
    ("rows of a matrix in reverse order", "float32", rows_in_reverse, UP),
    ("a matrix times 1.05, in bfloat16", "bfloat16", scaled(1.05), DOWN),
    ("a matrix times 1.02, in bfloat16", "bfloat16", scaled(1.02), DOWN),
    ("another base of the rotary embedding", "float32", rotary_base, ROTARY),
)


class Peers:
    """The tools, each from two checkpoints to an answer; axes of the tokens [8, 48]."""

    def __init__(self, venv: Path, tokens: Path) -> None:
        self.python = venv / "bin" / "python"
        self.polygraphy = str(venv / "bin" / "polygraphy")
        self.tokens = tokens
        self.environment = {
            **os.environ,
            "PYTHONPATH": str(venv / "sglang"),
            "PATH": f"{venv / 'bin'}:{os.environ['PATH']}",  # for the checks of a reduction
            "OMP_NUM_THREADS": "1",
        }

    def servanda(self, b: Path, dtype: str, folder: Path) -> Answer | None:
        done = self._run(
            *(sys.executable, "-m", "servanda", "bisect", f"transformers:{MODEL}@float32"),
            *(f"transformers:{b}@{dtype}", "--sequences", SEQUENCES, "--max-new-tokens", LENGTH),
            *("--quiet", "--format", "json"),
        )
        found = json.loads(done)
        named = found["outliers"] or found["cause"]
        differ = sum(module["differs"] for module in found["modules"])
        how = "an outlier" if found["outliers"] else f"explains {found['explained']:.0%}"
        return named[0], f"{how}; {count(differ, 'module')} of {len(found['modules'])} beyond noise"

    def comparator(self, b: Path, dtype: str, folder: Path) -> Answer | None:
        for name, model, form in (("a", MODEL, "float32"), ("b", b, dtype)):
            self._side("dump", model, form, folder / name)
        self._run(
            *(self.python, "-m", "sglang.srt.debug_utils.comparator", "--verbosity", "minimal"),
            *("--baseline-path", folder / "a", "--target-path", folder / "b"),
        )
        report = (folder / "b" / "run" / "comparator_report.jsonl").read_text()
        found = [json.loads(line) for line in report.splitlines()]
        tensors = [r for r in found if r["type"] == "comparison_tensor"]
        failed = [r["name"] for r in tensors if not r["diff"]["passed"]]
        first = re.sub(r"^non_intrusive__|\.(inputs|output)\b.*$", "", failed[0]) if failed else "-"
        return first, f"{len(failed)} of {len(tensors)} tensors fail"

    def reduce(self, b: Path, dtype: str, folder: Path) -> Answer | None:
        if dtype != "float32":
            return None  # ONNX Runtime has no kernels for bfloat16 on a CPU
        for name, model in (("a", MODEL), ("b", b)):
            self._side("onnx", model, dtype, folder / f"{name}.onnx")
        loader = folder / "loader.py"
        loader.write_text(
            "import json, numpy\n"
            "def load_data():\n"
            f"    yield {{'ids': numpy.array(json.load(open({str(self.tokens)!r})))}}\n"
        )
        given, all_, layers = (folder / f"{n}.json" for n in ("inputs", "outputs", "layers"))
        self._run(
            *(self.polygraphy, "run", folder / "a.onnx", "--onnxrt", "--onnx-outputs", "mark"),
            *("all", "--data-loader-script", loader, "--save-inputs", given),
            *("--save-outputs", all_),
        )
        self._run(self.polygraphy, "data", "merge", given, all_, "-o", layers)
        said = self._run(
            *(self.polygraphy, "debug", "reduce", folder / "b.onnx", "-o", folder / "least.onnx"),
            *("--mode=bisect", "--load-inputs", layers, "--check", self.polygraphy, "run"),
            *("polygraphy_debug.onnx", "--onnxrt", "--load-inputs", layers, "--load-outputs", all_),
            cwd=folder,
        )
        nodes, checks = self._nodes(folder), said.count("Running check")
        return nodes[0][1], f"{', '.join(n for n, _ in nodes)}; {checks} models checked"

    def _nodes(self, folder: Path) -> list[tuple[str, str]]:
        """Operators of the least model that fails, each with its module in the graph of B."""
        import onnx

        scopes = {
            node.output[0]: next(
                (p.value for p in node.metadata_props if p.key.endswith("name_scopes")), "[]"
            )
            for node in onnx.load(folder / "b.onnx").graph.node
        }
        found = []
        for node in onnx.load(folder / "least.onnx").graph.node:
            scope = re.findall(r"'([^']*)'", scopes.get(node.output[0], ""))
            module = scope[-2] if len(scope) > 1 else "-"
            found.append((node.op_type, module.removeprefix("model.")))
        return found

    def _side(self, form: str, model: Path, dtype: str, out: Path) -> None:
        side = Path(__file__).with_name("bisect_peers_side.py")
        self._run(self.python, side, form, model, dtype, self.tokens, out)

    def _run(self, *words: object, cwd: Path | None = None) -> str:
        done = subprocess.run(
            [*map(str, words)], cwd=cwd, env=self.environment, capture_output=True, text=True
        )
        if done.returncode not in (0, 1):  # 1: a difference
            raise RuntimeError(f"{words}\n{done.stdout}\n{done.stderr}")
        return done.stdout


def measured(tool: Tool, b: Path, dtype: str) -> tuple[Answer | None, float]:
    """The answer and the seconds of processor time of the tool and its children."""
    with tempfile.TemporaryDirectory() as folder:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        answer = tool(b, dtype, Path(folder))
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return answer, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def rows(peers: Peers) -> Iterator[Sequence[str]]:
    tools = {
        "`servanda bisect`": peers.servanda,
        "SGLang's comparator": peers.comparator,
        "`polygraphy debug reduce`": peers.reduce,
    }
    yield "fault", "tool", "names", "right", "and says", "time"
    for title, dtype, plant, guilty in FAULTS:
        with tempfile.TemporaryDirectory() as folder:
            b = Path(folder) / "b"
            shutil.copytree(MODEL, b)
            plant(b)
            own = 0.0
            for name, tool in tools.items():
                done = [measured(tool, b, dtype) for _ in range(RUNS)]
                answer, time = done[0][0], statistics.median(seconds for _, seconds in done)
                own = own or time
                if answer is None:
                    yield title, name, "-", "-", "ONNX Runtime has no bfloat16 on a CPU", "-"
                    continue
                right = "yes" if answer[0] == guilty else "no"
                yield title, name, f"`{answer[0]}`", right, answer[1], f"{time / own:.2g} ×"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--venv", type=Path, default=ROOT / ".venvs" / "peers")
    parser.add_argument("--write", action="store_true", help="put the table into its page")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tokens = Path(folder) / "tokens.json"
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, 1000, (SEQUENCES, LENGTH), generator=generator)
        tokens.write_text(json.dumps(ids.tolist()))
        head, *body = rows(Peers(options.venv.absolute(), tokens))
    lines = [head, ("---",) * len(head), *body]
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    print(text)
    if options.write:
        committed.write(PAGE, f"\n{text}\n", "make bench-bisect", BEGIN, END)


if __name__ == "__main__":
    main()
