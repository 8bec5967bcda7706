# Caches, kernels, builds: two kernels are compared, or one dump of a run.

import functools
import json
import tempfile
from pathlib import Path

import numpy as np

from servanda.contract.model import Kernel
from servanda.engines import open_engine
from servanda.rl import DraftCounts, Monitor
from servanda.theory import sampling
from tests import kit, oracles
from tests.engines.serving import live
from tests.field.rows import bug, known, servanda
from tests.field.servers import reloaded
from tests.field.sync import observed
from tests.field.worlds import NOISE, draw, run
from tests.kit import parse

CACHE = "Prefix cache, KV and state"
BUILDS = "Kernels, batches, builds"
SPECULATION = "Drafts and speculation"
SHORT, LONG = "abcdefghijkl", "ABCDEFGHIJKL"
TOKENS = [*SHORT, *LONG, "<eos>"]


def policy(seed=0):
    """Next-token probabilities by the last token; text in small letters goes on in them."""
    rng = np.random.default_rng(seed)
    rows = {}
    for letters, at in ((SHORT, 0), (LONG, len(SHORT))):
        for letter in letters:
            row = np.zeros(len(TOKENS))
            row[at : at + len(letters)] = 0.95 * rng.dirichlet(np.full(len(letters), 0.5))
            row[-1] = 0.05
            rows[letter] = row
    rows[""] = np.r_[np.full(len(TOKENS) - 1, 0.95 / (len(TOKENS) - 1)), 0.05]
    return rows


def noisy(rows, spread, letters=SHORT + LONG, seed=1):
    """The rows of these letters with noise on their logits, nats."""
    rng = np.random.default_rng(seed)
    found = {}
    for name, row in rows.items():
        moved = row * np.exp(spread * rng.standard_normal(len(row)))
        found[name] = moved / moved.sum() if name and name in letters else row
    return found


def forgetful(rows, share):
    """Rows of a kernel that has lost a share of what its cache knew of the last token."""
    mean = np.mean([rows[letter] for letter in SHORT + LONG], axis=0)
    return {name: (1 - share) * row + share * mean for name, row in rows.items()}


def compared(folder, a, b, preset):
    """`servanda compare A B` of two tables, on short prompts and prompts of eight times that."""
    for name, rows in (("a.json", a), ("b.json", b)):
        kit.table(folder, name, {k: row.tolist() for k, row in rows.items()}, tokens=TOKENS)
    texts = [" ".join(SHORT[(i + j) % 12] for j in range(4)) for i in range(12)]
    texts += [" ".join(LONG[(i + j) % 12] for j in range(32)) for i in range(12)]
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    kernels = (f"table:{folder / 'a.json'}", f"table:{folder / 'b.json'}")
    options = ("--prompts", prompts, "--max-new-tokens", 8, "--run-dir", folder / "run")
    return servanda("compare", *kernels, "--preset", preset, *options, "--quiet")


@functools.cache
def healthy(preset):
    """The same of two kernels that differ by noise alone."""
    with tempfile.TemporaryDirectory() as folder:
        return compared(Path(folder), policy(), noisy(policy(), 0.01), preset)


@bug(
    CACHE,
    "vllm-project/vllm#13133",
    "vllm-project/vllm#42179",
    "vllm-project/vllm#6135",
    what="with an FP8 KV cache the output cannot be read",
    command="servanda compare A B --preset fp8",
    state="caught",
    exit=1,
    says="VIOLATED: whole on all",
)
def fp8_cache(folder, broken):
    rows = policy()
    return compared(folder, rows, forgetful(rows, 0.5), "fp8") if broken else healthy("fp8")


@bug(
    CACHE,
    "vllm-project/vllm#15865",
    "vllm-project/vllm#23813",
    what="FP8 loses accuracy on contexts beyond 8k tokens",
    command="servanda compare A B --preset fp8 --prompts FILE (with prompts as long as yours)",
    state="caught",
    exit=1,
    says="✗ slice: mean tv              prompt_tokens>=16",
)
def fp8_on_long_contexts(folder, broken):
    rows = policy()
    return compared(folder, rows, noisy(rows, 0.3, LONG), "fp8") if broken else healthy("fp8")


@bug(
    SPECULATION,
    "vllm-project/vllm#38711",
    "vllm-project/vllm#30846",
    what="with multi-token prediction logprobs are wrong where an answer nears the model's length",
    command="servanda check DIR",
    state="caught",
    exit=1,
    says="✗   … response tokens from 64 on",
)
def wrong_near_the_end(folder, broken):
    last = (np.arange(96) >= 88) & broken
    how = functools.partial(draw, 21, noise=np.where(last, 2.5, NOISE))
    return servanda("check", run(folder / "dump", how, range(1, 7)), "--quiet")


BITWISE = """
apiVersion: servanda.dev/v1alpha1
kind: KernelContract
metadata: {name: bitwise}
bitwise: true
kernels:
  train: {engine: external}
  infer: {engine: external}
weights: {changes: every_step}
claim: realised
workload: {source: trainer}
statistical:
  - {id: equal, metric: abs_log_ratio_nats, aggregate: p99, at_most: 0.0}
"""


@bug(
    BUILDS,
    "pytorch/torchtitan#3498",
    what="bitwise mode leaves a constant difference of 4.8e-07",
    command="Monitor.observe (with a limit of 0)",
    state="caught",
    exit=1,
    says="✗ equal",
)
def not_bitwise(folder, broken):
    step = draw(40, 1)
    contract = parse(BITWISE, "bitwise.kernelcontract.yaml", engines=["external"])[0]
    train = (step.infer - 4.8e-7 * broken).astype(np.float32)
    infer = step.infer.astype(np.float32)
    return observed(Monitor(contract).observe(train, infer, step.mask, weights=1))


@bug(
    BUILDS,
    "vllm-project/vllm#5280",
    "vllm-project/vllm#15381",
    "vllm-project/vllm#4740",
    what="an upgrade of the server changes predictions, or the meaning of logprobs",
    command="servanda compare URL_A URL_B",
    state="caught",
    exit=1,
    says="VIOLATED: whole on all",
)
def upgraded(folder, broken):
    return two_servers(folder, new="Upgraded") if broken else equal_servers()


@bug(
    BUILDS,
    "vllm-project/vllm#49927",
    what="a change of one kernel moves the distribution; its operator builds an A/B harness by "
    "hand",
    command="servanda compare A B --preset vllm-upgrade",
    state="caught",
    exit=1,
    says="VIOLATED: whole on all",
)
def one_kernel_changed(folder, broken):
    if not broken:
        return healthy("vllm-upgrade")
    return compared(folder, policy(), noisy(policy(), 0.1), "vllm-upgrade")


@bug(
    BUILDS,
    "PrimeIntellect-ai/prime-rl#2671",
    "PrimeIntellect-ai/prime-rl#3543",
    what="KL of .03 at step 0, before any update; a bug of CUDA graphs read .194 where .024 is "
    "healthy",
    command="servanda check DIR",
    state="caught",
    exit=1,
    says="since step 0",
)
def red_before_any_update(folder, broken):
    noise = 0.35 if broken else NOISE
    return servanda(
        "check", run(folder / "dump", functools.partial(draw, 47, noise=noise), [0]), "--quiet"
    )


THRESHOLD = """
apiVersion: servanda.dev/v1alpha1
kind: KernelContract
metadata: {{name: ci, version: {version}}}
kernels:
  train: {{engine: external}}
  infer: {{engine: external}}
weights: {{changes: every_step}}
claim: realised
workload: {{source: trainer}}
statistical:
  - {{id: logprobs, metric: abs_log_ratio_nats, aggregate: mean, clip: 1.0, at_most: {limit}}}
"""


@bug(
    BUILDS,
    "NovaSky-AI/SkyRL#1408",
    "NVIDIA-NeMo/RL#1307",
    what="a threshold of CI is raised after an upgrade: “keep an eye on”",
    command="servanda contract diff OLD NEW",
    state="caught",
    exit=1,
    says="statistical.logprobs.at_most  0.07 -> 0.09",
)
def threshold_raised(folder, broken):
    for name, version, limit in (("old", "1.0.0", 0.07), ("new", "1.0.1", 0.09)):
        text = THRESHOLD.format(version=version, limit=limit if broken else 0.07)
        (folder / f"{name}.kernelcontract.yaml").write_text(text)
    return servanda(
        "contract", "diff", *(folder / f"{name}.kernelcontract.yaml" for name in ("old", "new"))
    )


@bug(
    "Meaning of the data",
    "swiss-ai/model-launch#173",
    "vllm-project/vllm#9519",
    what="on some paths the chat template and the tokenizer each add a BOS",
    command="servanda compare URL_A URL_B",
    state="caught",
    exit=1,
    says="surface   ✗ the chat template differs: clients get other responses",
)
def doubled_bos(folder, broken):
    return two_servers(folder, new="DoubledBos") if broken else equal_servers()


def two_servers(folder, new):
    """`servanda compare URL_A URL_B` of two servers on sockets."""
    from tests.field import servers

    return servers.compared(folder, servers.Served, getattr(servers, new))


def related(options, fault, *names, **how):
    """`servanda relations URL` of a server of a small model."""
    from tests.runner.relation_servers import related

    return related(options, fault, names, **how)


@functools.cache
def equal_servers():
    with tempfile.TemporaryDirectory() as folder:
        return two_servers(Path(folder), "Served")


@bug(
    CACHE,
    "NVIDIA-NeMo/RL#4018",
    what="the prefix cache is never reset over 17 weight updates: the mismatch grows in a job, "
    "and is gone after a restart",
    command="servanda check DIR",
    state="caught",
    exit=1,
    says="most likely a prefix cache",
)
def stale_prefixes(folder, broken):
    def how(step):
        hit = (np.arange(24) % 5 == 0) & broken
        noise = np.where(hit, 0.15 * step, NOISE)
        return draw(23, step, noise=noise[:, None])

    return servanda("check", run(folder / "dump", how), "--quiet")


@bug(
    BUILDS,
    "Tencent-Hunyuan/UniRL#208",
    what="a deterministic mode draws 8 equal answers a group: GRPO learns nothing, and its "
    "evaluation is inflated",
    command="servanda check DIR",
    state="caught",
    exit=4,
    says="Does the sampler repeat itself (deterministic, or seeded alike)",
)
def equal_answers(folder, broken):
    def how(step):
        drawn = draw(41, step)
        first = np.arange(24) // 8 * 8 if broken else np.arange(24)
        columns = {name: getattr(drawn, name)[first] for name in ("token", "train", "infer")}
        return drawn.but(**columns, group=8)

    return servanda("check", run(folder / "dump", how, range(1, 7)), "--quiet")


@bug(
    CACHE,
    "InternLM/lmdeploy#4917",
    what="`/update_weights` keeps the KV of stale prefixes",
    command="servanda preflight --checkpoint DIR --url URL",
    state="in part",
    exit=1,
    says="it scores known tokens from a cache of the old weights: reset its prefix cache after",
    missing="this answer is of a server that scores prompts as vLLM does; lmdeploy gives logprobs "
    "of generated tokens only, scores no prompt while it caches prefixes, and takes weights in a "
    "form of its own",
)
def update_keeps_prefixes(folder, broken):
    return reloaded(folder, "vllm", "stale_prefixes" if broken else "none")


@bug(
    CACHE,
    "vllm-project/vllm#53912",
    "vllm-project/vllm#43559",
    what="prefix caching and multi-token prediction corrupt hybrid models",
    command="servanda relations URL --only prefix-cache",
    state="caught",
    exit=1,
    says="✗ prefix-cache   violated",
)
def corrupt_prefixes(folder, broken):
    return related("prefix_cache=8", "prefix_hit:offset" if broken else "", "prefix-cache")


@bug(
    CACHE,
    "sgl-project/sglang#39830",
    what="a hit of the host's tier of the cache: 20 of 20 answers are fluent and wrong; cold and "
    "from the device 20 of 20 are right",
    command="servanda relations URL --only prefix-cache --between 1024",
    state="caught",
    exit=1,
    says="✗ prefix-cache   violated",
)
def wrong_in_the_second_tier(folder, broken):
    """Right as long as the prefix is in the first tier, of 64 blocks."""
    fault = "prefix_hit:demoted" if broken else ""
    return related("prefix_cache=8", fault, "prefix-cache", between=1024)


@bug(
    CACHE,
    "vllm-project/tpu-inference#3412",
    what="gsm8k .01 with prefix caching, .97 without",
    command="servanda relations URL --only prefix-cache",
    state="caught",
    exit=1,
    says="✗ prefix-cache   violated",
)
def prefixes_of_other_texts(folder, broken):
    return related("prefix_cache=8", "prefix_hit:context" if broken else "", "prefix-cache")


@bug(
    CACHE,
    "TheTom/llama-cpp-turboquant#305",
    what="K and V in q8_0: median KLD .055, same top token 74.9 %, and a smoke test passes",
    command="servanda compare A B --preset fp8 (B: llamacpp:M.gguf,attention=sdpa,kv_cache=q8_0)",
    state="caught",
    exit=1,
    says="VIOLATED: whole on all",
)
def quantised_cache(folder, broken):
    """Noise of the size in the thread: median KL .055, same top token at 72 % of the rows."""
    rows = policy()
    return compared(folder, rows, noisy(rows, 0.39), "fp8") if broken else healthy("fp8")


@bug(
    BUILDS,
    "vllm-project/vllm#48271",
    what="a block size switches at 256 tokens: prefill is not decode, and decode depends on load",
    command="servanda relations URL",
    state="caught",
    exit=1,
    says="(those of 1 modulo 8 tokens, from 9 on)",
)
def block_size_switches(folder, broken):
    return related("", "lost_block:8" if broken else "", "prompt-length", "prefill-decode")


@bug(
    BUILDS,
    "sgl-project/sglang#30821",
    "sgl-project/sglang#39581",
    "sgl-project/sglang#19431",
    "sgl-project/sglang#10785",
    what="a deterministic mode is broken by temperature, by an attention kernel, by TP ≥ 4",
    command="servanda relations URL --equal-bits",
    state="caught",
    exit=1,
    says="not equal bit for bit",
)
def not_deterministic(folder, broken):
    # a mode that runs each request by itself keeps all bits, and one that pads a batch does not
    return related("" if broken else "prefix_cache=8", "", "batching", wait_s=0.3, bitwise=True)


known(
    BUILDS,
    "sgl-project/sglang-omni#458",
    what="H20 against H200: 2 of 30 answers flip, and a threshold on a task turns red",
    command="servanda compare A B --preset new-gpu",
    state="in part",
    missing="texts only: images and sound are refused",
)
known(
    BUILDS,
    "NovaSky-AI/SkyRL#2201",
    what="wanted: trainer against engine over the whole vocabulary",
    command="golden clauses",
    state="in part",
    missing="exact where both run in one process; trainers whose parameters are sharded",
)
DRAFTED = """
apiVersion: servanda.dev/v1alpha1
kind: KernelContract
metadata: {name: drafts}
kernels: {train: {engine: external}, infer: {engine: external}}
weights: {changes: every_step}
claim: realised
workload: {source: trainer}
statistical: [{id: gradient, metric: tv, aggregate: mean, at_most: 0.05}]
runtime: {clauses: [{id: drafts, metric: draft_acceptance, at_least: 0.4}]}
"""


def drafted(target, draft, drafts=600, longest=3, by_draft=True):
    """What an engine counts of exact rejection sampling; logits of the next token, any context.

    Args:
        by_draft: accept by the ratio of both probabilities, not by the target's alone.
    """
    p, q = (np.exp(logits) / np.exp(logits).sum() for logits in (target, draft))
    rng = np.random.default_rng(22)
    token = rng.choice(len(q), size=(drafts, longest), p=q)
    kept = rng.random((drafts, longest)) < (p / q if by_draft else p)[token]
    accepted = np.cumprod(kept, axis=1).sum(axis=1)
    by_depth = tuple(int((accepted >= d).sum()) for d in range(1, longest + 1))
    return DraftCounts(drafts, drafts * longest, sum(by_depth), by_depth)


@bug(
    SPECULATION,
    "vllm-project/vime#351",
    "verl-project/verl#6947",
    "vllm-project/vllm#46725",
    what="only the target is synced: drafts are accepted about 0 % of the time instead of 58.6 %",
    command="Monitor.observe(drafts=DraftMeter(URL))",
    state="caught",
    exit=1,
    says="the target accepts fewer draft tokens than declared: likely causes are draft weights "
    "that are not synced",
)
def stale_draft(folder, broken):
    rng = np.random.default_rng(21)
    target, draft = (rng.normal(0, 3, 256) for _ in range(2))
    draft = draft if broken else target + 0.3 * draft / 3  # the draft was trained on another target
    monitor = Monitor(parse(DRAFTED, "drafts.kernelcontract.yaml", engines=[])[0])
    step = draw(10, 1, size=32)
    counts = drafted(target, draft)
    return observed(monitor.observe(step.train, step.infer, step.mask, weights=1, drafts=counts))


@bug(
    SPECULATION,
    "vllm-project/vllm#40149",
    what="rejection sampling is not given the draft's probabilities: texts keep their law, and "
    "drafts are accepted by the target's probability alone, which is less often",
    command="Monitor.observe(drafts=DraftMeter(URL))",
    state="caught",
    exit=1,
    says="or drafts accepted without the draft's own probabilities",
)
def draft_probabilities_dropped(folder, broken):
    target = np.random.default_rng(21).normal(0, 3, 256)
    draft = target + 0.1 * np.random.default_rng(23).normal(0, 3, 256)
    monitor = Monitor(parse(DRAFTED, "drafts.kernelcontract.yaml", engines=[])[0])
    step = draw(10, 1, size=32)
    counts = drafted(target, draft, by_draft=not broken)
    return observed(monitor.observe(step.train, step.infer, step.mask, weights=1, drafts=counts))


@bug(
    SPECULATION,
    "deepseek-ai/DeepSpec#31",
    what="drafts are drawn by other probabilities than those that they are accepted by: the law "
    "of the texts changes, and no logprob shows it",
    command="servanda tools selftest URL",
    state="caught",
    exit=1,
    says="or speculation that accepts drafts by other probabilities than it draws them by",
)
def drafts_drawn_otherwise(folder, broken):
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"token_ids": [i]}) + "\n" for i in range(24)))
    kit.table(folder, "p.json", {k: row.tolist() for k, row in policy().items()}, tokens=TOKENS)
    engine = open_engine(Kernel(engine="table", model=str(folder / "p.json")))

    def drawn_otherwise(logp_SV, uniform_S):
        """Drafts at 1.2 times the temperature, accepted as if drawn at 1.5 times."""
        laws = ([at(row, heat) for heat in (1, 1.5, 1.2)] for row in logp_SV)
        law_SV = [oracles.rejection_sampled(*law) for law in laws]
        with np.errstate(divide="ignore"):
            return sampling.draw(np.log(law_SV), uniform_S)

    def at(logp_V, temperature):
        weights_V = np.exp(logp_V / temperature)
        return weights_V / weights_V.sum()

    if broken:
        engine._draw = drawn_otherwise
    with live(engine) as (client, _):
        url = str(client.base_url)
        return servanda("tools", "selftest", url, "--prompts", prompts, "--quiet")
