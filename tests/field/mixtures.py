# Routing of experts: a real mixture is sampled in bfloat16 and scored in float32.

import functools
import json
from pathlib import Path

import numpy as np

from servanda.contract.model import Kernel
from servanda.engines import open_engine
from servanda.theory.sampling import Sampling
from servanda.traces.trace import Batch
from tests.field.rows import bug, known, servanda

ROOT = Path(__file__).parents[2]
MOE = "Routing of experts"
GROUPS, NEW = 40, 24


@functools.cache
def rollout():
    """Prompts, answers, the logprobs of both sides, and the experts of each token that is fed.

    The experts are those of one more pass of the sampler over the whole text, prompts included.
    """

    def opened(dtype):
        model = str(ROOT / "models" / "tiny-moe")
        return open_engine(Kernel(engine="transformers", model=model, dtype=dtype))

    infer, train = opened("bfloat16"), opened("float32")
    with (ROOT / "data" / "prompts.jsonl").open(encoding="utf-8") as lines:
        texts = [json.loads(line)["prompt"] for _, line in zip(range(GROUPS), lines, strict=False)]
    prompts = tuple(map(tuple, infer.encode(texts)))
    drawn = infer.generate(Batch(tuple(range(GROUPS)), prompts, NEW), Sampling(), 7)
    given = Batch(tuple(range(GROUPS)), prompts, NEW, drawn.continuations)
    scored = train.score(given, Sampling(), "prefill")
    whole = [[*p, *a] for p, a in zip(prompts, drawn.continuations, strict=True)]
    fed = Batch(
        tuple(range(GROUPS)),
        tuple((row[0],) for row in whole),
        max(map(len, whole)),
        tuple(tuple(row[1:]) for row in whole),
    )
    route_NLK = infer.score(fed, Sampling(), "prefill").routes
    assert route_NLK is not None
    answer_S, rows_S = drawn.length_S.cumsum()[:-1], np.cumsum([len(r) - 1 for r in whole])[:-1]
    return (
        whole,
        np.split(scored.columns["logp"], answer_S),
        np.split(drawn.columns["logp"], answer_S),
        np.split(route_NLK.astype(np.uint8), rows_S),
    )


@bug(
    MOE,
    "NovaSky-AI/SkyRL#1908",
    what="rows of routed experts are misaligned with their tokens",
    command="servanda check DIR",
    state="in part",
    missing="named where `train_data` holds the record; slime deletes it there when it replays",
    exit=4,
    says="the recorded experts are shifted: row t is that of token t-1",
)
def misaligned_replay(folder, broken):
    import torch

    samples = [
        {
            "tokens": tokens,
            "response_lengths": len(train),
            "loss_masks": [1] * len(train),
            "log_probs": train.tolist(),
            "rollout_log_probs": infer.tolist(),
            "rollout_routed_experts": torch.from_numpy(np.roll(route_TLK, int(broken), axis=0)),
        }
        for tokens, train, infer, route_TLK in zip(*rollout(), strict=True)
    ]
    place = folder / "dump" / "train_data"
    place.mkdir(parents=True)
    torch.save({"format_version": 2, "rollout_id": 1, "samples": samples}, place / "1.pt")
    return servanda("check", folder / "dump", "--quiet")


known(
    MOE,
    "verl-project/verl#7106",
    "verl-project/verl#7786",
    "verl-project/verl#7805",
    what="the replay of routed experts is dropped, or global",
    command="servanda check DIR",
    state="in part",
    missing="sequences without recorded experts are a warning; the trainer's routes are in no dump",
)
known(
    MOE,
    "NVIDIA/Megatron-LM#4256",
    what="some 10 % of the routers disagree, which touches 94 % of the tokens; Pearson's r is .6",
    command="servanda check DIR",
    state="in part",
    missing="the gap is seen; `router_touched` needs both kernels in engines here, not in a dump",
)
