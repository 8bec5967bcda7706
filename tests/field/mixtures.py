# Routing of experts: a real mixture is sampled in bfloat16 and scored in float32.

import functools

import numpy as np
import torch
from examples.moe import run as demo

from tests.field.rows import bug, servanda
from tests.rl.dumps.formats.made import sky_bytes

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
    what="rows of routed experts are misaligned with their tokens: in the batch, as here; after "
    "it, the experts of both sides are needed, and `servanda check DIR` names the shift",
    command="servanda check DIR --unsafe-pickles",
    state="caught",
    exit=4,
    says="the recorded experts are shifted: row t is that of token t-1",
)
def misaligned_replay(folder, broken):
    """The batch that SkyRL dumps: padded on the left, one row of experts a fed token."""
    drawn, own = rollout(), passes()["own"]
    logp_S = np.split(own.columns["logp"], own.length_S.cumsum()[:-1])
    wide, widest, size = max(map(len, drawn.texts)), max(drawn.answers), len(drawn.texts)
    layers, picked = drawn.routes[0].shape[1:]
    columns = {
        "sequences": np.zeros((size, wide), np.int64),
        "attention_mask": np.zeros((size, wide), np.int64),
        "response_mask": np.zeros((size, widest), np.int64),
        "loss_mask": np.zeros((size, widest), np.float32),
        "action_log_probs": np.zeros((size, widest), np.float32),
        "rollout_logprobs": np.zeros((size, widest), np.float32),
        "rollout_expert_indices": np.zeros((size, wide, layers, picked), np.uint8),
        "router_padding_mask": np.ones((size, wide), bool),
    }
    columns["rollout_expert_indices"][:] = np.arange(picked)
    for at, (text, answer) in enumerate(zip(drawn.texts, drawn.answers, strict=True)):
        start, fed = wide - len(text), slice(wide - len(text), wide - 1)
        columns["sequences"][at, start:] = text
        columns["attention_mask"][at, start:] = 1
        columns["rollout_expert_indices"][at, fed] = np.roll(drawn.routes[at], int(broken), axis=0)
        columns["router_padding_mask"][at, fed] = False
        for name in ("response_mask", "loss_mask"):
            columns[name][at, -answer:] = 1
        columns["action_log_probs"][at, -answer:] = logp_S[at][-answer:]
        columns["rollout_logprobs"][at, -answer:] = drawn.logp[at]
    place = folder / "dump" / "dumped_data"
    place.mkdir(parents=True)
    (place / "global_step_1_training_input.pkl").write_bytes(sky_bytes(columns, pad_size=0))
    return servanda("check", folder / "dump", "--unsafe-pickles", "--quiet")


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
