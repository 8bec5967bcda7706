# What the data means: transforms of the sampler, rows, masks, turns, kinds of prompts.

import numpy as np

from servanda.rl import Monitor
from tests.field.rows import bug, known, observed, servanda
from tests.field.worlds import NOISE, draw, reference, run

DATA = "Meaning of the data"
SIZE, WIDTH = 24, 96
STEPS = range(1, 7)
TURN = 32  # tokens of a turn, the last four of which a tool says


def checked(folder, how, steps=STEPS):
    return servanda("check", run(folder / "dump", how, steps), "--quiet")


@bug(
    DATA,
    "huggingface/trl#4873",
    "vllm-project/vllm#42259",
    what="at temperature .7 the trainer scales its logits, and the server reports raw logprobs",
    command="servanda check DIR",
    state="caught",
    exit=4,
    says="the mean importance weight is above 1, which is impossible for two distributions",
)
def raw_and_processed(folder, broken):
    reports = "raw" if broken else "processed"
    return checked(
        folder, lambda step: draw(50, step, temperature=0.7, scaled=True, reports=reports)
    )


@bug(
    DATA,
    "modelscope/ms-swift#8196",
    what="the rollout's logprobs are off by one token",
    command="servanda check DIR",
    state="caught",
    exit=4,
    says="the sampler's logprobs are shifted by +1 against the trainer's",
)
def off_by_one(folder, broken):
    def how(step):
        drawn = draw(51, step)
        return drawn.but(infer=np.roll(drawn.infer, 1, axis=1)) if broken else drawn

    return checked(folder, how)


@bug(
    DATA,
    "thinking-machines-lab/tinker-cookbook#396",
    what="logprobs that the sampler returns have less entropy than a recomputation, and are "
    "exactly 0 for many tokens; KL .05 → .1",
    command="servanda check DIR",
    state="caught",
    exit=1,
    says="VIOLATED on the whole: no slice explains it.",
)
def sharper_than_drawn(folder, broken):
    def how(step):
        drawn = draw(52, step)
        sharper = np.where(drawn.infer > -0.25, 0.0, 0.95 * drawn.infer)
        return drawn.but(infer=sharper) if broken else drawn

    return checked(folder, how)


@bug(
    DATA,
    "NVIDIA-NeMo/RL#4218",
    "NVIDIA-NeMo/RL#4229",
    what="logprobs that are missing are written as 0, and the logged metric hides it",
    command="servanda watch DIR --once",
    state="caught",
    exit=4,
    says="missing values that were written as 0",
)
def zero_filled(folder, broken):
    def how(step):
        drawn = draw(53, step)
        drawn.infer[:: SIZE // 4, -8:] *= not broken
        return drawn

    return servanda("watch", run(folder / "dump", how, STEPS), "--once")


@bug(
    DATA,
    "NVIDIA-NeMo/RL#2529",
    "NVIDIA-NeMo/RL#4167",
    "radixark/miles#542",
    what="packing: state of one sequence leaks into the first tokens of the next, in the trainer",
    command="servanda check DIR",
    state="caught",
    exit=1,
    says="✗   … response tokens before 16",
)
def packed(folder, broken):
    first = (np.arange(WIDTH) < 16) & broken
    return checked(folder, lambda step: draw(55, step, noise=np.where(first, 0.6, NOISE)))


@bug(
    DATA,
    "rllm-org/rllm#272",
    "verl-project/verl#6719",
    "modelscope/ms-swift#10012",
    "NVIDIA-NeMo/RL#2821",
    what="later turns are tokenised again, and come out as other tokens",
    command="servanda check DIR",
    state="caught",
    exit=1,
    says="perhaps lost or tokenised differently, in the first token of a turn",
)
def tokenised_again(folder, broken):
    def how(step):
        drawn, rng = draw(57, step), np.random.default_rng([57, step])
        for start in range(TURN, WIDTH, TURN):
            drawn.mask[:, start - 4 : start] = False
            other = (rng.random(SIZE) < 0.5) & broken
            drawn.train[other, start] = -rng.uniform(4, 14, SIZE)[other]
        return drawn

    return checked(folder, how, range(1, 13))


@bug(
    DATA,
    "NVIDIA-NeMo/RL#2100",
    what="15 to 20 % of the sequences are off by a factor of 100 to 670, all of one kind of prompt",
    command="servanda check DIR (the dump names the environment)",
    state="caught",
    exit=1,
    says="Likely cause   requests of env arc: its prompts, its sampling, its tools",
)
def one_kind_of_prompt(folder, broken):
    arc = (np.arange(SIZE) % 6 == 0) & broken
    labels = {"env": lambda s: "arc" if s % 6 == 0 else "math"}

    def how(step):
        return draw(60, step, noise=np.where(arc, 2.5, NOISE)[:, None], labels=labels)

    return checked(folder, how)


@bug(
    DATA,
    "huggingface/trl#6789",
    "huggingface/trl#6880",
    "huggingface/trl#6945",
    what="top-p: the engine renormalises and the trainer does not; 51.8 % of ratios are beyond "
    "±10 % where the kept mass is .895",
    command="servanda check DIR",
    state="caught",
    exit=1,
    says="of the trainer's mass and renormalises the rest: a top-p of at most 0.9",
)
def renormalised(folder, broken):
    return checked(folder, lambda step: draw(49, step, top_p=0.9 if broken else 1.0))


@bug(
    DATA,
    "verl-project/verl#7196",
    "verl-project/verl#4912",
    "verl-project/verl#5392",
    "NovaSky-AI/SkyRL#1813",
    what="bypass: the rollout's logprobs are used as the trainer's",
    command="servanda check DIR",
    state="caught",
    exit=4,
    says="UNSOUND: both sides' logprobs are equal in every bit",
)
def bypassed(folder, broken):
    def how(step):
        drawn = draw(54, step)
        return drawn.but(train=drawn.infer) if broken else drawn

    return checked(folder, how)


@bug(
    DATA,
    "verl-project/verl#7519",
    what="FP8 rollouts: kl grows from .0100 to .0313; with MXFP8 it is flat",
    command="servanda check DIR",
    state="caught",
    exit=1,
    says="low precision whose error grows with the weights; it grows x2",
)
def fp8_drifts(folder, broken):
    def how(step):
        left = np.clip((step - 5) / 5, 0, 1) if broken else -0.8
        return draw(64, step, size=12, noise=0.13 * (1 + left))

    return checked(folder, how, range(1, 16))


@bug(
    DATA,
    "vllm-project/vime#64",
    what="through SGLang the difference grows from .011 to .036 in 30 steps; through vLLM it "
    "is flat",
    command="servanda check DIR --reference good.reference.json",
    state="caught",
    exit=1,
    says="the gap has changed since step 4",
)
def threefold(folder, broken):
    steps = range(1, 31)

    def how(step):
        rises = broken * 2.3 * (step - 1) / 29
        return draw(65, step, size=12, width=32, noise=NOISE * (1 + rises))

    good = reference(folder, lambda seed, step: draw(seed, step, size=12, width=32), steps)
    dump = run(folder / "dump", how, steps)
    return servanda("check", dump, "--reference", good, "--quiet")


known(
    DATA,
    "huggingface/trl#5785",
    "huggingface/trl#6718",
    "unslothai/unsloth#5198",
    what="images: the padding side, placeholders expanded twice, rotary positions",
    command="the TRL hook",
    state="in part",
    missing="the gap is seen; no slice of images, prompts with images are refused",
)
WEIGHTED = """
apiVersion: servanda.dev/v1alpha1
kind: KernelContract
metadata: {name: weighted}
kernels: {train: {engine: external}, infer: {engine: external}}
weights: {changes: every_step}
claim: realised
workload: {source: trainer, sampling: {max_new_tokens: 4096}}
gradient: {weighting: {tis: 2.0}}
statistical: [{id: tv, metric: tv, aggregate: mean, at_most: 0.3, slices: [all]}]
observability:
  clauses:
    - {id: used, metric: declared_weight_ratio, at_least: 0.999}
    - {id: mean, metric: mean_weight_ratio, at_least: 0.5}
    - {id: effective, metric: effective_ratio, at_least: 0.3}
"""


@bug(
    DATA,
    "NVIDIA-NeMo/RL#2269",
    "huggingface/trl#7120",
    "huggingface/trl#5814",
    what="weights of whole sequences: mean .0596, so that a batch counts a seventeenth; `inf`",
    command="Monitor.observe(loss_weights=)",
    state="caught",
    exit=1,
    says="its weights are the product of w over the sequence, at most 2",
)
def weights_of_sequences(folder, broken):
    path = folder / "weighted.kernelcontract.yaml"
    path.write_text(WEIGHTED)
    step = draw(66, 1, size=32, noise=0.3)
    ratio = step.train - step.infer
    over = ratio.sum(axis=1, keepdims=True) if broken else ratio
    found = Monitor(path).observe(
        step.train, step.infer, step.mask, weights=1, loss_weights=np.minimum(np.exp(over), 2)
    )
    return observed(found)


known(
    "Vendors",
    "MoonshotAI/K2-Vendor-Verifier#19",
    what="one name, other numerics: a user cannot tell sampler, parser and quantisation apart",
    command="servanda compare URL_A URL_B",
    state="in part",
    missing="endpoints that return no token ids, or no logprobs of sampled tokens, are refused",
)
