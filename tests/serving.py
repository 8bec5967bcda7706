# Traffic for tests: requests that a table kernel served, as a proxy logs them.

import json
from pathlib import Path

import numpy as np

from servanda.engines import open_engine
from servanda.runner.run import load
from servanda.theory.sampling import uniforms
from servanda.traces.trace import Batch

RUN = "r1"


def rows(path, leg, n, *, seed=0, best=4, run=RUN, kernel=None, prompts=None, start=0, **more):
    """n rows of one leg: prompts of the contract at random, answered by its infer kernel.

    Args:
        best: likeliest tokens that are logged; 0: none.
        kernel: that answers, if not the contract's infer.
        start: index of the first row.
        more: further keys of every row.
    """
    contract = load(path)
    engine = open_engine(kernel or contract.kernels.infer)
    workload = contract.workload
    lines = [json.loads(line) for line in Path(workload.prompts).read_text().splitlines()]
    lines = [lines[i] for i in prompts] if prompts else lines
    which = [int(uniforms(seed, "who", i, 1)[0] * len(lines)) for i in range(start, start + n)]
    ids = engine.encode([lines[w]["prompt"] for w in which])
    batch = Batch(
        tuple(range(start, start + n)), tuple(map(tuple, ids)), workload.sampling.max_new_tokens
    )
    tokens, logps, bests = ([[] for _ in which] for _ in range(3))
    steps = engine.steps(batch, workload.sampling.transform, 1000 + seed, best=best) if n else ()
    for step in steps:
        at = np.flatnonzero(step.length_S)
        for k, row in enumerate(at.tolist()):
            tokens[row].append(int(step.token_N[k]))
            logps[row].append(float(step.columns["logp"][k]))
            bests[row].append(
                [
                    [int(step.columns[f"id.{b}"][k]), float(step.columns[f"logp.{b}"][k])]
                    for b in range(best)
                ]
            )
    sampling = {"temperature": 1.0, "max_new_tokens": workload.sampling.max_new_tokens}
    eos = engine.describe().eos
    return [
        {
            "index": start + i,
            "run": run,
            "leg": leg,
            "at": 1000.0 + start + i,
            "served": (start + i + 1) * 10,
            "prompt_token_ids": list(ids[i]),
            "token_ids": tokens[i],
            "logprobs": logps[i],
            **({"best": bests[i]} if best else {}),
            "labels": lines[which[i]].get("labels", {}),
            "sampling": sampling,
            "finish": "stop" if tokens[i][-1] in eos else "length",
            **more,
        }
        for i in range(n)
    ]


def log(folder, rows, name="served.jsonl"):
    """Append rows to a log; returns its path."""
    path = Path(folder) / name
    with path.open("a", encoding="utf-8") as file:
        file.writelines(f"{json.dumps(row)}\n" for row in rows)
    return path


def lost(row, why="timeout"):
    """The row of a request that was launched and never answered."""
    answer = ("token_ids", "logprobs", "best", "finish", "fingerprint")
    return {**{k: v for k, v in row.items() if k not in answer}, "lost": why}
