# Run by the Python of TRL: real GRPO trainers on models/tiny-lm.  Prints one JSON line:
# scenario -> what came of it.
#
#     python trl_runs.py WATCHING MASKING STATE

# ruff: noqa: E402 - torch and TRL read the environment when they are imported

import json
import os
import sys
from pathlib import Path

os.environ.update(OMP_NUM_THREADS="1", TRL_EXPERIMENTAL_SILENCE="1")

import numpy as np
import torch

torch.set_num_threads(1)

from datasets import Dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from servanda.contract.kernel_string import parse_kernel
from servanda.engines import open_engine
from servanda.engines.faults.sync import SYNC_FAULTS
from servanda.engines.weight_sync import WeightSync
from servanda.errors import ServandaError
from servanda.rl import Monitor, preflight
from servanda.rl.dumps.formats import open_dump
from servanda.rl.trl import Dumping, Monitored, drilled, rollouts
from servanda.theory.sampling import Sampling
from servanda.traces.trace import Batch

ROOT = Path(__file__).parents[2]
MODEL = str(ROOT / "models" / "tiny-lm")
KERNEL = f"transformers:{MODEL}@bfloat16"
ROWS = Dataset.from_dict({"prompt": ["12 + 7 =", "def sum("] * 4, "task": ["a", "b"] * 4})


class Trainer(Monitored, GRPOTrainer): ...


class InProcess:
    """An engine of Servanda behind the interface of TRL's VLLMGeneration."""

    def __init__(self, trainer):
        self.trainer, self.draws = trainer, rollouts(KERNEL)

    def sync_weights(self):
        self.draws.sync_of(self.trainer)()

    def generate(self, prompts, images, num_generations, profiler):
        batch = Batch(
            tuple(range(len(prompts))),
            tuple(map(tuple, prompts)),
            self.trainer.max_completion_length,
        )
        trace = self.draws.engine.generate(batch, Sampling(), seed=self.trainer.state.global_step)
        logps = np.split(trace.columns["logp"], np.cumsum(trace.length_S)[:-1])
        tops = [[[float(logp)] for logp in own] for own in logps]
        return prompts, [list(ids) for ids in trace.continuations], tops, None


class OfRLOO(RLOOTrainer):
    """vLLM's place is taken by an engine that runs on a CPU; the rest is TRL's."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.use_vllm, self.vllm_mode, self._last_loaded_step = True, "colocate", -1
        self.vllm_generation = InProcess(self)


class RLOO(Monitored, OfRLOO): ...


def made(base=GRPOTrainer, peft=None, out="runs", config=None, kind=GRPOConfig, **settings):
    return base(
        model=MODEL,
        args=kind(
            str(out),
            bf16=False,
            use_cpu=True,
            logging_steps=1,
            save_strategy="no",
            max_completion_length=8,
            **{"max_steps": 2, **(config or {})},
        ),
        train_dataset=ROWS,
        reward_funcs=lambda completions, **_: [float(len({*text})) for text in completions],
        peft_config=peft,
        **settings,
    )


LORA = LoraConfig(task_type="CAUSAL_LM", r=32, target_modules="all-linear")


def error_of(call):
    try:
        call()
    except ServandaError as error:
        return str(error)
    return None


def a_drill(peft=None, fault=None):
    """A drill of a real trainer; the sync is the trainer's own, or a broken one."""
    engine = open_engine(parse_kernel(KERNEL, engines=["transformers"]))
    trainer = made(peft=peft, rollout_func=rollouts(engine))
    if fault:
        broken = SYNC_FAULTS[fault].inject(WeightSync, True)
        trainer.rollout_func._sync = broken(trainer.model, engine)
    found = preflight(trainer)
    return {"outcome": found.outcome, "cause": found.cause, "exit": found.exit_code}


def a_run(contract, state, **settings):
    trainer = made(
        Trainer,
        monitor=Monitor(contract, state=state),
        slices=("task",),
        rollout_func=rollouts(KERNEL),
        **settings,
    )
    trainer.train()
    return {"steps": trainer.state.global_step, "log": trainer.state.log_history}


def an_rloo_run(watching, acting, state):
    options = {"slices": ("task",), "kind": RLOOConfig}
    trainer = made(RLOO, monitor=Monitor(watching, state=state), config={"beta": 0.05}, **options)
    trainer.train()
    return {
        "log": trainer.state.log_history,
        "no engine": error_of(
            lambda: made(type("T", (Monitored, RLOOTrainer), {}), monitor=Monitor("trl"), **options)
        ),
        "acting": error_of(lambda: made(RLOO, monitor=Monitor(acting), **options)),
    }


def a_dump(contract, folder):
    """What a run keeps: every sequence, with its prompt and labels."""
    trainer = made(
        Trainer,
        monitor=Monitor(contract, dump=folder, sample=1.0),
        slices=("task",),
        rollout_func=rollouts(KERNEL),
    )
    trainer.train()
    parts = list(open_dump(folder).read())
    decode = trainer.processing_class.decode
    return {
        "steps": [p.step for p in parts],
        "prompts": sorted(
            {
                decode(ids[: int(mask.argmax())])
                for p in parts
                for ids, mask in zip(
                    *(np.split(a, np.cumsum(p.length_S)[:-1]) for a in (p.token_N, p.mask_N)),
                    strict=True,
                )
            }
        ),
        "labels": [{n: sorted({*v}) for n, v in p.labels.items()} for p in parts],
    }


def all_sequences(folder):
    """servanda.rl.trl.Dumping: every sequence, or an error where TRL has no logprobs."""
    trainer = made(
        type("Dumped", (Dumping, GRPOTrainer), {}),
        dump=folder,
        rollout_func=rollouts(KERNEL),
        config={"gradient_accumulation_steps": 2, "steps_per_generation": 4, "max_steps": 2},
    )
    trainer.train()
    once = made(
        type("Dumped", (Dumping, GRPOTrainer), {}), dump=folder, rollout_func=rollouts(KERNEL)
    )
    (part,) = open_dump(folder).read()
    return {"step": part.step, "sequences": len(part), "error": error_of(once.train)}


def a_follow(state, fault=None, peft=None):
    """The answers about an engine that is synced by the trainer's own sync, or by a broken one."""
    engine = open_engine(parse_kernel(KERNEL, engines=["transformers"]))
    trainer = made(
        Trainer,
        monitor=Monitor("trl", state=state),
        rollout_func=rollouts(engine),
        follow=True,
        peft=peft,
        config={"max_steps": 4, "learning_rate": 1e-2 if peft else 1e-4},
    )
    if fault:
        trainer.rollout_func._sync = SYNC_FAULTS[fault].inject(WeightSync, True)(
            trainer.model, engine
        )
    trainer.train()
    return trainer.state.log_history


# a generation that four updates learn from, with an evaluation after each; two to an update
RARE = {
    "max_steps": 4,
    "gradient_accumulation_steps": 2,
    "steps_per_generation": 4,
    "num_iterations": 2,
    "eval_strategy": "steps",
    "eval_steps": 1,
}
OFTEN = {"gradient_accumulation_steps": 2, "steps_per_generation": 1}

LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "vespo")
# where the weights go: into advantages, or where TRL's correction of vLLM has put its own
PLACES = {"advantages": None, "token": (8, 8), "sequence": (8, 1)}


def losses(masking):
    """TRL's own losses of a batch as the mixin leaves it, and as they should be."""
    trainer = made(Trainer, monitor=Monitor(masking), rollout_func=rollouts(KERNEL))
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    return {
        f"{kind} {place}": a_loss(trainer, kind, shape)
        for kind in LOSSES
        for place, shape in PLACES.items()
        if (kind, place) != ("vespo", "sequence")  # which TRL refuses
    }


def a_loss(trainer, kind, shape):
    base, found = GRPOTrainer._generate_and_score_completions, {}
    rows = [ROWS[i // 8] for i in range(8)]

    def keep(self, inputs):
        before = base(self, inputs)
        before["advantages"] = torch.linspace(-1, 1, len(inputs))
        found["scored"] = self._score(before, np.ones(len(inputs), bool))
        # the first tokens are far off, as the trainer has them
        before["old_per_token_logps"] = found["scored"].clone()
        before["old_per_token_logps"][:, :4] = before["sampling_per_token_logps"][:, :4] - 4
        if shape:
            before["importance_sampling_ratio"] = torch.full(shape, 7.0)
        found["before"] = before
        return {**before}

    trainer.loss_type = kind
    GRPOTrainer._generate_and_score_completions = keep
    after = trainer._generate_and_score_completions(rows)
    GRPOTrainer._generate_and_score_completions = base
    trainer.use_vllm = shape is not None
    with torch.no_grad():
        loss = GRPOTrainer._compute_loss(trainer, trainer.model, after).item()
    trainer.use_vllm = False
    before, logps_BT = found["before"], found["scored"].double()
    advantage_B1 = before["advantages"][:, None].double()
    weight_BT = (logps_BT - before["sampling_per_token_logps"]).exp().clamp(max=1.02)
    kept_BT = before["completion_mask"].clone()
    kept_BT[:, :4] = 0
    each_BT = -advantage_B1 * weight_BT * kept_BT  # by the definition, at ratio 1
    if kind == "vespo":
        log_w_B1 = (weight_BT.log() * kept_BT).sum(1, keepdim=True)
        k, rate = (torch.where(advantage_B1 >= 0, *of) for of in ((2.0, 3.0), (3.0, 2.0)))
        phi_B1 = (rate + k * log_w_B1 - rate * log_w_B1.exp()).exp()
        each_BT = -phi_B1 * advantage_B1 * logps_BT * kept_BT
    if kind == "grpo":
        wanted = (each_BT.sum(1) / kept_BT.sum(1)).mean()
    else:  # dr_grpo divides by a constant
        wanted = each_BT.sum() / (kept_BT.numel() if kind == "dr_grpo" else kept_BT.sum())
    return {"loss": loss, "wanted": wanted.item()}


def main(watching, masking, folder):
    folder = Path(folder)
    silent = folder / "silent.py"
    silent.write_text("import trl\n")
    broken = folder / "broken.py"
    broken.write_text("import trl\nopen('nowhere')\n")
    script = ROOT / "examples" / "trl_grpo.py"
    found = {
        "run": a_run(watching, folder / "steps.jsonl"),
        "scored": a_run(watching, folder / "scored.jsonl", score_share=1.0),
        "rare": a_run(watching, folder / "rare.jsonl", config=RARE, eval_dataset=ROWS),
        "often": a_run(watching, folder / "often.jsonl", config=OFTEN),
        "refused": error_of(lambda: made(Trainer, monitor=Monitor(watching))),
        "no engine": error_of(lambda: preflight(made())),
        "healthy": a_drill(),
        "lora": a_drill(peft=LORA),
        "adapter ignored": a_drill(peft=LORA, fault="adapter_ignored"),
        "tied head": a_drill(fault="tied_head_stale"),
        "losses": losses(masking),
        "follows": a_follow(folder / "follows.jsonl"),
        "frozen": a_follow(folder / "frozen.jsonl", "never_synced"),
        "adapted": a_follow(folder / "adapted.jsonl", peft=LORA),
        "ignored": a_follow(folder / "ignored.jsonl", "adapter_ignored", peft=LORA),
        "silent": error_of(lambda: drilled(silent)),
        "broken": error_of(lambda: drilled(broken)),
        "script": drilled(script).outcome,
        "rloo": an_rloo_run(watching, masking, folder / "rloo.jsonl"),
        "dump": a_dump(watching, folder / "kept"),
        "all": all_sequences(folder / "all"),
    }
    print("\n" + json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:4])
