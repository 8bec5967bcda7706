"""A check of prompts from 1k to 128k tokens, and its memory: `make demo-long`, some 15 minutes.

A Qwen3 with two layers and random weights is made, since no shipped model takes such prompts.  Both
sides prefill in steps of 1,024 tokens (`prefill_chunk`), so that their memory grows with the cache
of keys and values alone.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import threading
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
LENGTHS = [1 << n for n in (10, 12, 14, 16, 17)]
CONTRACT = """\
# Do the two kernels agree at every length?  `servanda check` exits 0.
apiVersion: servanda.dev/v1alpha1
kind: KernelContract
metadata: {{name: long}}
kernels:
  train: {{engine: transformers, model: model, attention: sdpa, batch_size: 1, prefill_chunk: 1024}}
  infer: {{engine: transformers, model: model, dtype: bfloat16, attention: sdpa, batch_size: 1,
    prefill_chunk: 1024}}
workload:
  prompts: prompts.jsonl
  round: {groups}
  sampling: {{temperature: 1.0, max_new_tokens: 32, seed: 7}}
runtime: {{envelope: {{prompt_tokens: [1, {most}]}}}}
slices:
  - {{name: kind, split: labels.kind}}
  - {{name: length, split: request.prompt_tokens, at: {edges}}}
claim: realised
statistical:
  - {{id: tv, metric: tv, aggregate: mean, at_most: 0.05, slices: all}}
  - {{id: tv-slice, metric: tv, aggregate: mean, at_most: 0.2, slices: [kind, length]}}
promotion: {{offline: {{prompt_groups: [{groups}, {groups}]}}}}
"""


def made(folder: Path, context: int) -> None:
    """A random Qwen3 whose logits spread over some nats, with the tokenizer of tiny-qwen3."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=1024, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=1, num_key_value_heads=1, head_dim=64, tie_word_embeddings=False,
        max_position_embeddings=context, initializer_range=0.3,
        bos_token_id=None, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).eval()
    with torch.no_grad():
        spread = model(torch.randint(1, 1000, (2, 64))).logits.std()
        model.lm_head.weight.mul_(2.5 / spread)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ROOT / "models" / "tiny-qwen3" / name, folder)


def resident(pid: int) -> int:
    """Bytes in memory of a process and its descendants; shared pages count once each."""
    total = 0
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            total += 1024 * int(line.split()[1]) if line.startswith("Pss:") else 0
        for task in Path(f"/proc/{pid}/task").iterdir():
            children = (task / "children").read_text().split()
            total += sum(resident(int(child)) for child in children)
    except (OSError, ValueError, IndexError):
        pass  # it has ended
    return total


def checked(folder: Path) -> tuple[int, int]:
    """Exit code of the check, and the most memory that all its processes had together."""
    command = [sys.executable, "-m", "servanda", "check", "long.kernelcontract.yaml"]
    process = subprocess.Popen([*command, "--run-dir", "run"], cwd=folder)
    most, ended = 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not ended.wait(0.2):
            most = max(most, resident(process.pid))

    watcher = threading.Thread(target=watch)
    watcher.start()
    code = process.wait()
    ended.set()
    watcher.join()
    return code, most


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/long"))
    parser.add_argument("--tokens", type=int, nargs="+", default=LENGTHS)
    given = parser.parse_args()
    folder = given.out.resolve()
    shutil.rmtree(folder, ignore_errors=True)
    made(folder / "model", max(given.tokens) + 64)
    words = [str(n) for n in given.tokens]
    prompts = [sys.executable, str(HERE / "prompts.py"), str(folder / "model")]
    subprocess.run([*prompts, "-o", str(folder / "prompts.jsonl"), "--tokens", *words], check=True)
    edges = [n + 1 for n in sorted(given.tokens)[:-1]]
    contract = CONTRACT.format(most=max(given.tokens), groups=3 * len(given.tokens), edges=edges)
    (folder / "long.kernelcontract.yaml").write_text(contract)
    code, most = checked(folder)
    print(f"most memory of all processes of the check: {most / 2**30:.2f} GiB")
    return code


if __name__ == "__main__":
    raise SystemExit(main())
