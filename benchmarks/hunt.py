"""What is found in the newest releases: docs/results/found.md.

make hunt                                 measures in an environment of its own, and writes the page
python -m benchmarks.hunt --measure       writes benchmarks/measured/hunt.json; fifteen minutes
python -m benchmarks.hunt --write         writes the page from it
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import committed
from benchmarks.experiment.tables import markdown

ROOT = Path(__file__).parents[1]
REPROS = Path(__file__).parent / "found"
MEASURED = ROOT / "benchmarks" / "measured" / "hunt.json"
PAGE = ROOT / "docs" / "results" / "found.md"
VENVS = Path(os.environ.get("SERVANDA_VENVS", ROOT / ".venvs")).absolute()
EQUAL_NATS = 1e-3
_VERSIONS = (
    "import torch, transformers as t; print(f'Transformers {t.__version__}, PyTorch "
    "{torch.__version__.split(chr(43))[0]}')"
)


@dataclass(frozen=True)
class Found:
    """A finding in Transformers.

    Args:
        file: of the repro, in benchmarks/found; ways: architecture -> the ways that show it.
        what, why: what differs, and the lines that cause it; thread: what upstream knows.
        command: of Servanda that finds it.
    """

    file: str
    ways: Mapping[str, tuple[str, ...]]
    what: str
    why: str
    thread: str
    command: str


FOUND = (
    Found(
        "gpt_neo_static_cache.py",
        {"gpt_neo": ("static_cache", "generate_static")},
        "GPT-Neo with a static cache: other logits, and other tokens from "
        '`generate(cache_implementation="static")`',
        "`GPTNeoSelfAttention._attn` cuts its causal mask at `key_length - query_length`. With a "
        "static cache `key_length` is the size of the cache, not the number of tokens in it",
        "no thread found",
        "`servanda compare A B`, where B is a server that decodes with a static cache",
    ),
    Found(
        "falcon_alibi_eager.py",
        {"falcon-alibi": ("sdpa",)},
        "Falcon with ALiBi: eager attention is not SDPA",
        "`FalconModel.forward` adds ALiBi to the causal mask, and the eager branch of "
        "`FalconAttention.forward` adds it once more",
        "no thread found; [#29946](https://github.com/huggingface/transformers/issues/29946) was "
        "another difference of the same two branches",
        "`servanda compare transformers:MODEL,attention=eager transformers:MODEL,attention=sdpa`: "
        "violated, mean tv 0.059",
    ),
    Found(
        "bamba_cached_positions.py",
        {"bamba": ("decode", "pieces", "static_cache")},
        "Bamba: a token after a cache gets position 0, unless the caller passes `position_ids`",
        "`BambaModel.forward` counts positions from 0 and ignores the length of the cache, which "
        "other architectures add. `generate` passes positions and is not affected",
        "no thread found",
        "`servanda relations URL --only prefill` on a server that calls the model without positions",
    ),
    Found(
        "mamba_pieces.py",
        {
            "mamba": ("pieces",),
            "falcon_mamba": ("pieces",),
            "jamba": ("pieces", "generate_pieces"),
        },
        "Mamba, FalconMamba and Jamba: of a sequence in pieces, each piece but the first begins "
        "with an empty state; for Jamba also in `generate(prefill_chunk_size=8)`",
        "the mixers pass the cached recurrent state to the kernel of a single token alone; the scan "
        "of several tokens begins at 0",
        "the same defect was fixed for Mamba2 "
        "([#46032](https://github.com/huggingface/transformers/issues/46032)) and Qwen3.5 "
        "([#45513](https://github.com/huggingface/transformers/pull/45513))",
        "`servanda relations URL --only cache` on a server that reuses such a cache",
    ),
    Found(
        "gpt_oss_packed.py",
        {"gpt_oss": ("packed",), "afmoe": ("packed",)},
        "GPT-OSS and AFMoE: sequences that are packed in one row attend to each other",
        "their models do not pass `position_ids` to `create_causal_mask`, which finds the "
        "boundaries of other architectures there",
        "[#39997](https://github.com/huggingface/transformers/pull/39997) for GPT-OSS, open since "
        "August 2025",
        "`servanda check DIR` of a trainer that packs: cause *packing*",
    ),
)
# (way, why) -> architectures: differences that are no finding
EXPLAINED = {
    (
        "packed",
        "positions that begin again are ignored: packed rows need an attention of blocks, or "
        "`cu_seq_lens`, in the layers that keep a state",
    ): (
        *("bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "lfm2", "lfm2_moe"),
        *("mamba", "mamba2", "minimax", "nemotron_h", "olmo_hybrid", "qwen3_5_moe_text"),
        *("qwen3_5_text", "qwen3_next", "recurrent_gemma", "rwkv", "xlstm", "zamba2"),
    ),
    (
        "packed",
        "ALiBi, or absolute positions of an older design without a mask from positions",
    ): ("biogpt", "bloom", "mpt", "openai-gpt", "opt", "xglm"),
    (
        "left_padding",
        "known: [#31201](https://github.com/huggingface/transformers/issues/31201)",
    ): ("recurrent_gemma",),
    ("left_padding", "the mask is unused, and a warning says so"): ("rwkv",),
    ("left_padding", "the model takes no mask"): ("xlstm",),
    (
        "embeddings",
        "documented: with embeddings `per_layer_inputs` has to be passed as well",
    ): ("gemma3n_text",),
}
_TEXT = """
{versions}, on a CPU in float32: {architectures} architectures by {ways} ways, each compared with
one forward pass over the whole sequence. A *difference* is one of a logprob above {limit} nats.

{counts}

{found}

{details}

Differences that are no finding:

{explained}

{failed} configurations could not be built and are not counted.
"""


def measured(python: Path) -> dict[str, Any]:
    """The versions, what each way of each architecture gave, and what each repro printed."""

    def run(*words: str) -> str:
        done = subprocess.run(
            [str(python), *words], capture_output=True, text=True, check=True, cwd=REPROS
        )
        return done.stdout.strip()

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "explored.json"
        run("explore.py", str(out))
        explored = json.loads(out.read_text(encoding="utf-8"))
    repros = {one.file: run(one.file).splitlines()[-1] for one in FOUND}
    return {"versions": run("-c", _VERSIONS), "explored": explored, "repros": repros}


def differences(explored: Mapping[str, Any]) -> set[tuple[str, str]]:
    """(architecture, way) where the two ways differ."""
    return {
        (name, way)
        for name, of in explored.items()
        for way, value in of.items()
        if isinstance(value, float) and value > EQUAL_NATS
    }


def accounted() -> set[tuple[str, str]]:
    """Those that are findings, or explained."""
    found = {(name, way) for one in FOUND for name, ways in one.ways.items() for way in ways}
    return found | {(name, way) for (way, _), names in EXPLAINED.items() for name in names}


def _details(record: Mapping[str, Any]) -> Iterator[str]:
    for one in FOUND:
        yield f"**{one.what}.** {one.why}. Upstream: {one.thread}. With Servanda: {one.command}."
        yield f"`{one.file}` prints {record['repros'][one.file]}."
        yield ""


def page(record: Mapping[str, Any]) -> str:
    explored = {name: of for name, of in record["explored"].items() if "" not in of}
    values = [value for of in explored.values() for value in of.values()]
    errors = sum(isinstance(value, str) for value in values)
    differ = len(differences(explored))
    findings = {(name, way) for one in FOUND for name, ways in one.ways.items() for way in ways}
    counts = markdown(
        ("comparisons", "equal", "refused with an error", "differ", "findings", "explained"),
        [
            (
                f"{len(values):,}",
                f"{len(values) - errors - differ:,}",
                str(errors),
                str(differ),
                str(len(findings)),
                str(differ - len(findings)),
            )
        ],
    )
    found = markdown(
        ("finding", "architectures", "largest difference, nats", "repro"),
        [
            (
                one.what,
                ", ".join(one.ways),
                f"{max(explored[n][w] for n, ways in one.ways.items() for w in ways):.2g}",
                f"`benchmarks/found/{one.file}`",
            )
            for one in FOUND
        ],
    )
    explained = markdown(
        ("way", "why", "architectures"),
        [(way, why, ", ".join(names)) for (way, why), names in EXPLAINED.items()],
    )
    return _TEXT.format(
        versions=record["versions"],
        architectures=len(explored),
        ways=max(map(len, explored.values())),
        counts=counts,
        found=found,
        limit=f"{EQUAL_NATS:g}",
        details="\n".join(_details(record)).rstrip(),
        explained=explained,
        failed=len(record["explored"]) - len(explored),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    if args.measure:
        record = measured(VENVS / "hunt" / "bin" / "python")
        MEASURED.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if args.write:
        record = json.loads(MEASURED.read_text(encoding="utf-8"))
        committed.write(PAGE, page(record), "make hunt")


if __name__ == "__main__":
    main()
