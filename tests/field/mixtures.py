# Routing of experts: a real mixture is sampled in bfloat16 and scored in float32.

import functools

import numpy as np
import torch
from examples.moe import run as demo

from tests.field.rows import bug, servanda

MOE = "Routing of experts"


@functools.cache
def rollout():
    return demo.sampled(demo.opened("bfloat16"))


@functools.cache
def passes():
    return demo.passes(demo.opened("float32"), rollout())


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
    drawn, own = rollout(), passes()["own"]
    logp_S = np.split(own.columns["logp"], own.length_S.cumsum()[:-1])
    rows = zip(drawn.texts, drawn.answers, logp_S, drawn.logp, drawn.routes, strict=True)
    samples = [
        {
            "tokens": tokens,
            "response_lengths": answer,
            "loss_masks": [1] * answer,
            "log_probs": train[-answer:].tolist(),
            "rollout_log_probs": infer.tolist(),
            "rollout_routed_experts": torch.from_numpy(np.roll(route_TLK, int(broken), axis=0)),
        }
        for tokens, answer, train, infer, route_TLK in rows
    ]
    place = folder / "dump" / "train_data"
    place.mkdir(parents=True)
    torch.save({"format_version": 2, "rollout_id": 1, "samples": samples}, place / "1.pt")
    return servanda("check", folder / "dump", "--quiet")


@bug(
    MOE,
    "verl-project/verl#7106",
    "verl-project/verl#7786",
    "verl-project/verl#7805",
    what="the replay of routed experts is dropped, or covers some layers only",
    command="servanda check DIR",
    state="caught",
    exit=4,
    says="the trainer says that it replays the sampler's experts, and",
)
def dropped_replay(folder, broken):
    train = passes()["partial" if broken else "replayed"]
    return servanda(
        "check", demo.written(folder / "dump", rollout(), train, replays=True), "--quiet"
    )


@bug(
    MOE,
    "NVIDIA/Megatron-LM#4256",
    what="some 10 % of the routers disagree, which touches 94 % of the tokens; Pearson's r is .6",
    command="servanda check DIR",
    state="caught",
    exit=1,
    says="! the trainer routes by itself: other experts than the sampler's in",
)
def routers_that_disagree(folder, broken):
    engine = demo.opened("float32")
    for router in engine._recorder.routers if broken else ():
        noise = torch.randn(router.weight.shape, generator=torch.Generator().manual_seed(0))
        router.weight.data += 0.7 * router.weight.std() * noise
    train = demo.scored(engine, rollout())
    return servanda(
        "check", demo.written(folder / "dump", rollout(), train, replays=False), "--quiet"
    )
