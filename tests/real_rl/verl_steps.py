# Run by the Python of verl: steps of its own PPOTrainer and its own functions, without Ray.
#
#     python verl_steps.py WATCHING CORRECTING CALLS
#
# The TransferQueue is a dict, the workers are one object that gives recorded logprobs; the rest
# is verl's.  Prints one JSON line: scenario -> what came of it.

import json
import sys
import tempfile

import numpy as np
import torch
from omegaconf import OmegaConf
from tensordict import NonTensorStack, TensorDict
from transfer_queue import KVBatchMeta

PROMPT = 3  # tokens of every prompt
GROUP = 4


class Queue:
    """verl's rows by key, in the containers that verl puts them into."""

    def __init__(self, rows, tags):
        self.rows, self.tags = rows, tags

    def kv_batch_get(self, keys, partition_id, select_fields):
        there = [name for name in select_fields if all(name in self.rows[key] for key in keys)]
        columns = {name: [self.rows[key][name] for key in keys] for name in there}
        nested = {
            name: torch.nested.as_nested_tensor(values, layout=torch.jagged)
            if isinstance(values[0], torch.Tensor)
            else NonTensorStack.from_list(values)
            for name, values in columns.items()
        }
        return TensorDict(nested, batch_size=len(keys))

    def kv_batch_put(self, keys, partition_id, fields):
        for name in fields.keys():  # noqa: SIM118 - a TensorDict iterates over rows
            for key, value in zip(keys, fields[name].unbind(), strict=True):
                self.rows[key][name] = value
        return self.meta(keys)

    def meta(self, keys):
        return KVBatchMeta(keys=list(keys), tags=[self.tags[k] for k in keys], partition_id="train")


class Workers:
    """The actor: what it is asked to score, it has recorded."""

    def __init__(self, queue, scored, ranks=2):
        self.queue, self.scored, self.asked = queue, scored, []
        self._dispatch_info = {"actor": list(range(ranks))}

    def compute_log_prob(self, batch):
        self.asked.append(list(batch.keys))
        # of a share, whose number verl's micro-batches need not divide
        assert ("micro_batch_size_per_gpu" in batch.extra_info) == (len(batch) < len(self.scored))
        for key in batch.keys:
            # of token j + 1 at place j; the prompt's are nobody's business
            logp = torch.cat([torch.zeros(PROMPT - 1), self.scored[key], torch.zeros(1)])
            self.queue.rows[key]["log_probs"] = logp
            self.queue.rows[key]["entropy"] = torch.zeros_like(logp)
        return batch


def trainer_of(calls, correction, calculate=True):
    from verl.trainer.ppo.v1 import trainer_base
    from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

    given = {name.removeprefix("given/"): calls[name] for name in calls if "given/" in name}
    rows, tags, scored = {}, {}, {}
    for i, width in enumerate(given["response_mask"].sum(axis=1)):
        width -= i % 3  # answers of different lengths
        key, uid = f"{i // GROUP}_{i % GROUP}_0", str(i // GROUP)
        mine = {n: torch.tensor(v[i, :width]) for n, v in given.items() if n != "uid"}
        scored[key] = mine.pop("old_log_probs")
        score = torch.zeros(width)
        score[-1] = float(i % GROUP)
        mine["rm_scores"] = score
        prompts = torch.arange(PROMPT)
        extra = {"num_cached_tokens": i % 2, "global_steps": 2}
        if i % 4:  # verl counts drafts of a request whose engine reports them
            extra |= {"spec_num_verify_steps": 5, "spec_num_draft_tokens": 10}
            extra["spec_num_accepted_tokens"] = 4 + i % 2
        rows[key] = {
            "prompts": prompts,
            "uid": uid,
            "data_source": "gsm8k",
            "extra_fields": extra,
            **mine,
        }
        tags[key] = {"seq_len": PROMPT + int(width), "min_global_steps": 2, "max_global_steps": 2}
    queue = Queue(rows, tags)
    trainer_base.tq = queue
    sys.modules["transfer_queue"].kv_batch_get = queue.kv_batch_get
    trainer = object.__new__(PPOTrainerSync)
    trainer.global_steps = 3
    trainer.use_critic, trainer.kl_ctrl_in_reward = False, None
    trainer.actor_rollout_wg = Workers(queue, scored)
    trainer.config = OmegaConf.create(
        {
            "algorithm": {
                "rollout_correction": correction,
                "use_kl_in_reward": False,
                "adv_estimator": "grpo",
                "gamma": 1.0,
                "lam": 1.0,
            },
            "actor_rollout_ref": {
                "rollout": {"temperature": 1.0, "calculate_log_probs": calculate, "n": GROUP},
                "actor": {"loss_agg_mode": "token-mean", "loss_scale_factor": None},
            },
        }
    )
    return trainer, queue


def step(contract, calls, correction, recompute=0.0, calculate=True, kept=None):
    """A step as verl makes it: old logprobs, then advantages."""
    from servanda.rl import Monitor
    from servanda.rl import verl as plugin
    from servanda.rl.dumps.formats import open_dump

    watch = plugin.install()
    vars(watch).clear()  # each scenario begins anew
    watch.__init__(Monitor(contract, dump=kept, sample=1.0), recompute)
    trainer, queue = trainer_of(calls, correction, calculate)
    metrics = {}
    try:
        batch = trainer._compute_old_log_prob(queue.meta(queue.rows), metrics)
        trainer._compute_advantage(batch, metrics)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    rows = [*queue.rows.values()]
    names = [n for n in ("response_mask", "rollout_is_weights") if n in rows[0]]
    written = {n: [row[n].tolist() for row in rows] for n in names} | {"left": batch.extra_info}
    if kept is not None:
        (part,) = open_dump(kept).read()
        labels = {name: sorted({*values}) for name, values in part.labels.items()}
        written |= {"step": part.step, "labels": labels}
    return {"metrics": metrics, "asked": trainer.actor_rollout_wg.asked, **written}


def main(watching, correcting, path):
    calls = dict(np.load(path))
    on = {"rollout_is": None, "rollout_rs": None, "bypass_mode": False}
    bypass = {"bypass_mode": True}
    with tempfile.TemporaryDirectory() as kept:
        decoupled = step(watching, calls, None, kept=kept)
    found = {
        "decoupled": decoupled,
        "corrected": step(correcting, calls, on),
        "nowhere": step(correcting, calls, None),
        "bypass": step(watching, calls, bypass),
        "recomputed": step(watching, calls, bypass, recompute=0.25),
        "unasked": step(watching, calls, None, calculate=False),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:4])
