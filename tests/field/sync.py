# Weight sync, adapters and versions.

from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from servanda.errors import EvidenceError
from servanda.rl import Monitor
from tests.field.rows import Answer, bug, observed, servanda
from tests.field.worlds import NOISE, draw, reference, run

SYNC = "Weight sync and adapters"
FLEET = 6
DRIFTED = 0.25  # nats a logit: an engine whose weights are some updates behind


def drilled(folder: Path, text: str) -> Answer:
    """`servanda preflight FILE.py:NAME` on a script of this text."""
    (folder / "drill.py").write_text(text)
    return servanda("preflight", folder / "drill.py:sync", "--quiet")


ADAPTER = """
from servanda.engines.weight_sync import WeightSync
from servanda.engines.faults.sync import SYNC_FAULTS
from servanda.rl.sync_drill.trainee import Trainee
from tests.trainers import MODELS, adapt, open_engine, score, trainer

tokens = [[(7 * i + 3 * j) % 1000 + 1 for j in range(25)] for i in range(6)]

def sync():
    module, engine = trainer("qwen3", moved=0.0), open_engine(MODELS / "tiny-qwen3", "bfloat16")
    adapt(module)
    sender = {sender}
    return Trainee(module, sender(module, engine), lambda rows: score(engine, rows), tokens)
"""


@bug(
    SYNC,
    "unslothai/unsloth#8701",
    what="LoRA training; every rollout comes from the base model",
    command="servanda preflight FILE.py:NAME",
    state="caught",
    exit=1,
    says="the adapters never reach the engine: rollouts come from the base model",
)
def adapter_ignored(folder, broken):
    fault = 'SYNC_FAULTS["adapter_ignored"].inject(WeightSync, True)'
    return drilled(folder, ADAPTER.format(sender=fault if broken else "WeightSync"))


SLEEP = """
import torch
from tests.rl.sync_drill.toys import Engine, Toy
from servanda.rl.sync_drill.trainee import Trainee

class Sleeping(Engine):
    '''At level 2 weights are dropped when the engine sleeps, and it wakes with what is there.'''

    def sync(self):
        super().sync()
        if {broken}:
            noise = torch.Generator().manual_seed(1)
            with torch.no_grad():
                for weight in self.model.parameters():
                    weight.copy_(torch.randn(weight.shape, generator=noise, dtype=weight.dtype))

def sync():
    module = Toy()
    engine = Sleeping(module)
    return Trainee(module, engine.sync, engine.score)
"""


@bug(
    SYNC,
    "huggingface/trl#5312",
    what="`vllm_enable_sleep_mode` drops the synced weights; mean logprob difference .015 → .201",
    command="servanda preflight FILE.py:NAME",
    state="caught",
    exit=1,
    says="the sync returns, but no weight reaches the engine",
)
def weights_lost_in_sleep(folder, broken):
    return drilled(folder, SLEEP.format(broken=broken))


@bug(
    SYNC,
    "vllm-project/vllm#45835",
    "vllm-project/vllm#28425",
    "vllm-project/vllm#41670",
    what="scales of FP8 stay uninitialised memory after a layerwise reload: logprobs are NaN",
    command="Monitor.observe",
    state="caught",
    exit=4,
    says="launched tokens have no usable logprob (NaN, infinite, or a lost sequence)",
)
def uninitialised_scales(folder, broken):
    step = draw(10, 1, size=32)
    infer = step.infer.copy()
    if broken:
        infer[: len(infer) // 4] = np.nan
    return observed(Monitor("verl-sync").observe(step.train, infer, step.mask, weights=1))


@bug(
    SYNC,
    "THUDM/slime#1695",
    what="after a resume from a checkpoint the logprob difference is very high for some steps",
    command="servanda check DIR",
    state="caught",
    exit=1,
    says="✗ each step alone: 9 hold, 3 violated (steps 7 to 9)",
)
def resumed(folder, broken):
    def how(step):
        return draw(13, step, noise=0.6 if broken and 7 <= step <= 9 else NOISE)

    return servanda("check", run(folder / "dump", how), "--quiet")


@bug(
    SYNC,
    "ai-dynamo/dynamo#9131",
    "sgl-project/sglang-omni#663",
    what="a weight update is not atomic: one worker fails, and the fleet serves two versions",
    command="servanda check DIR (the dump names the replica)",
    state="caught",
    exit=1,
    says="replica r3: an engine that keeps old weights",
)
def mixed_fleet(folder, broken):
    def how(step):
        late = (np.arange(24) % FLEET == 3) & broken & (step >= 6)
        noise = np.where(late, DRIFTED, NOISE)[:, None]
        return draw(15, step, noise=noise, labels={"replica": lambda s: f"r{s % FLEET}"})

    return servanda("check", run(folder / "dump", how), "--quiet")


@bug(
    SYNC,
    "radixark/miles#2244",
    what="after a failover the version counter falls: staleness is negative, and a filter is inert",
    command="Monitor.observe(staleness=)",
    state="caught",
    exit=4,
    says="a token is -5 updates old",
)
def version_fell(folder, broken):
    step, monitor = draw(16, 1, size=32), Monitor("verl-async")
    trained, drawn = 12, 17 if broken else 11
    try:
        found = monitor.observe(
            step.train, step.infer, step.mask, weights=trained, staleness=[trained - drawn] * 32
        )
    except EvidenceError as error:
        return Answer(error.exit_code, str(error))
    return observed(found)


@bug(
    SYNC,
    "verl-project/verl#7495",
    what="asynchronous LoRA is never delivered: of 399 tensors of a sync none is the adapter's; "
    "`rollout_corr/kl` grows 36-fold in two months, and reads as staleness",
    command="servanda check DIR --reference good.reference.json",
    state="caught",
    exit=1,
    says="the gap has changed since step 2",
)
def adapter_never_delivered(folder, broken):
    def how(step):
        return draw(1, step, size=12, width=48, noise=NOISE * (1 + broken * (step - 1) / 4))

    good = reference(folder, lambda seed, step: draw(seed, step, size=12, width=48))
    return servanda("check", run(folder / "dump", how), "--reference", good, "--quiet")


SERVED = """
from servanda.rl import Trainee
from tests.rl.served_weights import small_model, trained
from tests.trainers import adapt

def sync():
    module = adapt(small_model())
    return Trainee.from_urls(module, "{url}", sync=trained(module, "{url}").sync)
"""


@bug(
    SYNC,
    "modelscope/ms-swift#9855",
    what="an asynchronous server ignores the updated LoRA; its user showed it by a reward on "
    "length",
    command="servanda preflight FILE.py:NAME (`Trainee.from_urls`)",
    state="in part",
    exit=1,
    says="the adapters never reach the engine: rollouts come from the base model",
    missing="this answer is of a server that scores prompts as vLLM does; `swift rollout` has no "
    "such endpoint, so `score` has to be written by hand",
)
def server_ignores_the_adapter(folder, broken):
    from tests.rl.served_weights import begun, saved, serving, small_model

    with serving(saved(small_model(), folder / "model"), "vllm") as (url,):
        begun(url, "ignores" if broken else "none")
        return drilled(folder, SERVED.format(url=url))


@bug(
    SYNC,
    "huggingface/trl#6344",
    what="a worker of one's own skips the LoRA sync, and the version counter still rises",
    command="Monitor.observe(versions=, older=)",
    state="caught",
    exit=4,
    says="replica r3 claims version 12 and samples from 11",
)
def counter_rises(folder, broken):
    step, rng = draw(17, 12, size=48), np.random.default_rng(17)
    update = rng.normal(0, 0.03, step.infer.shape)
    held, other = step.train, np.minimum(step.train + update, 0)
    late = (np.arange(48) % FLEET == 3)[:, None] & broken
    found = Monitor("verl-sync").observe(
        np.where(late, other, held),
        step.infer,
        step.mask,
        weights=12,
        versions=[12] * 48,
        older={1: np.where(late, held, other)},
        labels={"replica": [f"r{s % FLEET}" for s in range(48)]},
    )
    return observed(found)


RELAID = """
import torch
from tests.rl.sharded_faults import TOKENS, Small
from tests.rl.sync_drill.toys import Engine
from servanda.rl.sync_drill.trainee import Trainee

class Relaid(Engine):
    '''A sync writes the checkpoint's order of experts into the kernel's.'''

    def sync(self):
        super().sync()
        if {broken}:
            experts = self.model.layers[0].mlp.experts.up_proj
            with torch.no_grad():
                experts.copy_(experts[[2, 0, 1]])

def sync():
    module = Small("stacked")
    engine = Relaid(module)
    return Trainee(module, engine.sync, engine.score, TOKENS)
"""


@bug(
    SYNC,
    "verl-project/verl#7195",
    what="tensors in the layout of the checkpoint are written into that of a kernel: experts lie "
    "in the wrong places",
    command="servanda preflight FILE.py:NAME",
    state="caught",
    exit=1,
    says="a sync of unchanged weights moves the engine away from the trainer: check the shape, "
    "order and names of the tensors",
)
def experts_in_wrong_places(folder, broken):
    return drilled(folder, RELAID.format(broken=broken))


EXPERTS = 64


@bug(
    SYNC,
    "vllm-project/vime#388",
    what="expert parallelism: expert 0 equals expert 32; from HF to Megatron and back the cosine "
    "is .24 in all layers",
    command="servanda tools weights HF1 HF2",
    state="caught",
    exit=1,
    says="layers.0.experts.32.weight  holds layers.0.experts.0.weight of A",
)
def experts_of_the_first_rank(folder, broken):
    draw = np.random.default_rng(0)
    names = [f"layers.{layer}.experts.{e}.weight" for layer in range(3) for e in range(EXPERTS)]
    before = {name: draw.normal(size=(8, 16)).astype(np.float32) for name in names}
    # back from the trainer, in another precision
    after = {name: values.astype(np.float16) for name, values in before.items()}
    if broken:  # the second of two ranks writes what the first has
        half = EXPERTS // 2
        first = [names[i - half] if i % EXPERTS >= half else names[i] for i in range(len(names))]
        after = {name: after[held] for name, held in zip(names, first, strict=True)}
    for side, tensors in (("hf1", before), ("hf2", after)):
        (folder / side).mkdir()
        save_file(tensors, folder / side / "model.safetensors")
    return servanda("tools", "weights", folder / "hf1", folder / "hf2")


EXPORTED = """
from pathlib import Path
from safetensors.torch import save_file
from servanda.rl import Stream, Trainee
from tests.rl.sharded_faults import TOKENS, Small
from tests.rl.sync_drill.toys import Engine

def exported(name):
    # as a trainer of several ranks counts its experts
    for e in range(3):
        if f"experts.{{e}}." in name:
            return name.replace(f"experts.{{e}}.", f"experts.{{(e + 1) % 3}}.")
    return name

def sync():
    module = Small("separate", tied=False)
    engine = Engine(module)
    base = Path({folder!r})
    tensors = {{name: p.detach().clone() for name, p in module.named_parameters()}}
    save_file(tensors, base / "model.safetensors")

    def pairs():
        for name, parameter in module.named_parameters():
            yield exported(name) if {broken} else name, parameter.detach()

    def load(sent):
        mine = engine.model.state_dict()
        for name, tensor in sent:
            mine[name].copy_(tensor)

    return Trainee(module, Stream(pairs, load, checkpoint=base), engine.score, TOKENS)
"""


@bug(
    SYNC,
    "Accio-Lab/Dressage#1",
    what="the first update from Megatron to SGLang turns a mixture of experts into token salad",
    command="servanda preflight FILE.py:NAME",
    state="caught",
    exit=1,
    says="the sync sends tensors in the places of others, or with rows in another order than in "
    "the checkpoint",
)
def experts_exported_in_wrong_order(folder, broken):
    return drilled(folder, EXPORTED.format(folder=str(folder), broken=broken))


FP8 = """
import torch
from servanda.engines.weight_sync import WeightSync
from servanda.rl import Trainee
from tests.trainers import MODELS, open_engine, score, trainer

BLOCK, LARGEST = 32, 448.0  # of the matrices; of float8_e4m3fn

def blocks(matrix):
    tall, wide = (-(-side // BLOCK) * BLOCK for side in matrix.shape)
    padded = torch.zeros(tall, wide)
    padded[: matrix.shape[0], : matrix.shape[1]] = matrix
    return padded.reshape(tall // BLOCK, BLOCK, wide // BLOCK, BLOCK)

def served(matrix, processed):
    '''What a kernel multiplies with that reads the scales as powers of two.

    A load rounds them up first and quantises by the rounded ones; raw scales are cut instead.
    '''
    cut = blocks(matrix)
    scale = cut.abs().amax((1, 3), keepdim=True).clamp_min(1e-6) / LARGEST
    read = 2.0 ** torch.log2(scale).ceil()
    quantised = cut / (read if processed else scale)
    if not processed:
        read = 2.0 ** torch.log2(scale).floor()
    values = quantised.to(torch.float8_e4m3fn).float() * read
    tall, wide = cut.shape[0] * BLOCK, cut.shape[2] * BLOCK
    return values.reshape(tall, wide)[: matrix.shape[0], : matrix.shape[1]]

class Reload(WeightSync):
    broken = False

    def _tensors(self):
        for name, tensor in super()._tensors():
            if tensor.dim() == 2 and "embed" not in name and "lm_head" not in name:
                # the scales of a square matrix keep their shape, so its reload is not finished
                raw = self.broken and tensor.shape[0] == tensor.shape[1]
                tensor = served(tensor, processed=not raw)
            yield name, tensor

def sync():
    module, engine = trainer("qwen3", moved=0.0), open_engine(MODELS / "tiny-qwen3", "bfloat16")
    reload = Reload(module, engine)
    reload()  # the engine starts with its checkpoint in FP8
    reload.broken = {broken}
    return Trainee(module, reload, lambda rows: score(engine, rows))
"""


@bug(
    SYNC,
    "sgl-project/sglang#30761",
    what="a reload of blockwise FP8: layers whose shapes survive serve raw scales, silently",
    command="servanda preflight FILE.py:NAME",
    state="caught",
    exit=1,
    says="a sync of unchanged weights moves the engine away from the trainer",
)
def raw_scales(folder, broken):
    return drilled(folder, FP8.format(broken=broken))


RESYNC = """
from tests.rl.sync_drill.toys import Engine, Toy
from servanda.rl.sync_drill.trainee import Trainee

class Packed(Engine):
    '''A backend that packs its scales at the first load, and cannot take them again.'''

    def sync(self):
        if {broken}:
            raise RuntimeError("weight_scale: shape [32, 4] does not fit [4, 32]")
        super().sync()

def sync():
    module = Toy()
    engine = Packed(module)
    return Trainee(module, engine.sync, engine.score)
"""


@bug(
    SYNC,
    "verl-project/verl#7136",
    "verl-project/verl#7978",
    what="a resync of FP8 or of a bfloat16 mixture ends with an error under the backend that vLLM "
    "picks; of a script that syncs once, `servanda bisect --settings` names the backend",
    command="servanda preflight FILE.py:NAME",
    state="caught",
    exit=4,
    says="sync of unchanged weights: the sync raised RuntimeError: weight_scale",
)
def resync_crashes(folder, broken):
    return drilled(folder, RESYNC.format(broken=broken))
