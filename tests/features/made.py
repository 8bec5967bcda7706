# Training steps whose truth is known, and the dumps of them that six trainers would write.
#
# The sampler draws each token from VOCABULARY logits of its own; the trainer's are the same times
# `scale`, plus noise of `sigma` nats.  So the distance of the two in a context is a direct sum over
# the vocabulary, and what a step measures is a direct sum over its tokens.  All sequences of a run
# have one layout, so that each step has every turn, position and label in the same proportions.
#
# Axes: S sequences, L trained tokens of a sequence, R its response with tool results, V vocabulary.

import math
import re
from dataclasses import dataclass, field, replace

import numpy as np

from servanda.rl.dumps.formats.parquet import Writer
from tests.rl.dumps.formats import made as formats

VOCABULARY = 24
PROMPT, TOOL = 8, 4
FIRST_OF_TURN = 3
CLIP_NATS = 0.182
# a token is counted in a bin of its log ratio with nine bits: its middle is off by half a bin
BIN = 2.0**-9


@dataclass(frozen=True)
class Steps:
    """How the steps of a run are made.

    Args:
        turns: trained tokens of each turn; sequences: of each step, or its own number by step.
        sigma, scale: of (step, place of the token), numbers or arrays [S, L].
        recorded: factor of the logits in the logprobs that the sampler reports; 1: those it
            sampled with.
        labels: name -> value of sequence s; age: updates since sequence s was sampled.
        break_it: changes the columns of a step that was made: (rng, step, columns).
    """

    steps: int
    sequences: int
    turns: tuple = (40, 24, 16)
    sigma: object = 0.02
    scale: object = 1.0
    recorded: float = 1.0
    labels: dict = field(default_factory=dict)
    age: object = None
    few: dict = field(default_factory=dict)
    break_it: object = None
    seed: int = 1


@dataclass(frozen=True)
class Step:
    """One step: the columns of its trained tokens [S, L], and where they lie.

    Args:
        tv, clipped: of the contexts: mean of (1 - w)^+, and probability of |log ratio| > CLIP_NATS.
        at: [L], of a trained token: its place in the response, from 0.
    """

    number: int
    token: np.ndarray
    train: np.ndarray
    infer: np.ndarray
    tv: np.ndarray
    clipped: np.ndarray
    mask: np.ndarray
    at: np.ndarray
    fields: dict
    labels: dict
    age: np.ndarray | None

    @property
    def size(self):
        return len(self.token)

    def wide(self, values, fill):
        """A column of trained tokens over the whole sequence, [S, PROMPT + R]."""
        out = np.full(
            (self.size, PROMPT + int(self.at[-1]) + 1), fill, np.result_type(values, fill)
        )
        out[:, PROMPT + self.at] = values
        return out

    @property
    def tokens(self):
        """Ids, [S, PROMPT + R]: two sequences share a prompt, no two pairs do.

        The two begin with other tokens, for their laws there are not one.
        """
        whole = self.wide(self.token, 30)
        whole[1::2, PROMPT + int(self.at[0])] += 1000
        pair = np.arange(self.size) // 2
        whole[:, :PROMPT] = (
            100 + (pair[:, None] + 1000 * self.number) // 10 ** np.arange(PROMPT) % 10
        )
        return whole

    @property
    def groups(self):
        return [f"{self.number}.{s // 2}" for s in range(self.size)]


def layout(turns):
    """Of each trained token, [L]: the place in the response, turn, place in the turn, position."""
    rows, at = [], 0
    for turn, size in enumerate(turns, 1):
        rows += [(at + i, turn, i) for i in range(size)]
        at += size + TOOL
    at_L, turn_L, in_turn_L = map(np.array, zip(*rows, strict=True))
    fields = {"turn": turn_L, "turn_position": in_turn_L, "position": np.arange(len(at_L))}
    return at_L, {**fields, "length": PROMPT + at_L}


def made(run):
    """All steps of a run, from its seed."""
    rng = np.random.default_rng(run.seed)
    return [_step(rng, run, number) for number in range(1, run.steps + 1)]


def _step(rng, run, number):
    at_L, fields = layout(run.turns)
    size = run.few.get(number, run.sequences)
    labels = {n: [of(s) for s in range(size)] for n, of in run.labels.items()}
    age_S = None if run.age is None else np.array([run.age(s) for s in range(size)])
    place = {**fields, "labels": {n: np.array(v)[:, None] for n, v in labels.items()}}
    place["age"] = np.zeros((size, 1)) if age_S is None else age_S[:, None]
    shape = size, len(at_L)
    sigma, scale = (
        np.broadcast_to(of(number, place) if callable(of) else of, shape)[..., None]
        for of in (run.sigma, run.scale)
    )
    logits = rng.normal(0, 2, (*shape, VOCABULARY))
    infer = _log_softmax(logits)
    train = _log_softmax(scale * logits + sigma * rng.normal(size=logits.shape))
    p = np.exp(infer)
    token = (p.cumsum(axis=-1) < rng.random((*shape, 1))).sum(axis=-1).clip(max=VOCABULARY - 1)
    ratio = train - infer
    sides = train, _log_softmax(run.recorded * logits)
    own = [np.take_along_axis(x, token[..., None], axis=-1)[..., 0] for x in sides]
    step = Step(
        number,
        token,
        *own,
        tv=(p * np.maximum(-np.expm1(ratio), 0)).sum(axis=-1),
        clipped=(p * (np.abs(ratio) > CLIP_NATS)).sum(axis=-1),
        mask=np.ones(shape, dtype=bool),
        at=at_L,
        fields={n: np.broadcast_to(v, shape) for n, v in fields.items()},
        labels=labels,
        age=age_S,
    )
    return step if run.break_it is None else replace(step, **(run.break_it(rng, step) or {}))


def _log_softmax(x):
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


# ---- the oracle: one slice, one mean


def inside(step, name):
    """The trained tokens in a slice, [S, L], from what its name says."""
    if name == "all":
        return step.mask
    fields = {**step.fields, "stale": None if step.age is None else step.age[:, None]}
    if found := re.fullmatch(r"(turn|start|stale)-(\d+)(-on|-to-(\d+))?", name):
        kind, low, more, high = found.groups()
        value = fields["stale" if kind == "stale" else "turn"]
        high = math.inf if more == "-on" else int(high or low)
        chosen = (value >= int(low)) & (value <= high)
        chosen = chosen & (fields["turn_position"] < FIRST_OF_TURN) if kind == "start" else chosen
    elif found := re.fullmatch(r"(position|length)(<|>=)(\d+)", name):
        value, edge = fields[found[1]], int(found[3])
        chosen = value < edge if found[2] == "<" else value >= edge
    elif found := re.fullmatch(r"(position|length)=(\d+)\.\.(\d+)", name):
        chosen = (fields[found[1]] >= int(found[2])) & (fields[found[1]] < int(found[3]))
    else:
        label, _, value = name.partition("-")
        chosen = np.array([own == value for own in step.labels[label]])[:, None]
    return step.mask & chosen


def over(steps, first, last, name, column):
    """A column of the tokens of a slice in steps first to last, [K]."""
    some = [step for step in steps if first <= step.number <= last]
    return np.concatenate([column(step)[inside(step, name)] for step in some])


def true_mean(steps, clause, first, last, name):
    """The mean that a clause limits, over the contexts that were met: a sum over the vocabulary."""
    return float(over(steps, first, last, name, lambda s: getattr(s, clause)).mean())


def measured(steps, clause, first, last, name):
    """What the tokens show, by direct summation, and how far the middle of a bin is from it."""
    ratio_K = over(steps, first, last, name, lambda s: s.train - s.infer)
    known_K = ratio_K[np.isfinite(ratio_K)]
    if clause == "finite":
        return len(known_K) / len(ratio_K), 0.0
    if clause == "clipped":
        edge_K = np.abs(np.abs(known_K) / CLIP_NATS - 1) < BIN
        return float((np.abs(known_K) > CLIP_NATS).mean()), float(edge_K.mean())
    value = float(np.maximum(-np.expm1(known_K), 0).mean())
    return value, BIN * float(np.abs(known_K).mean())


# ---- six writers


def _sequences(step, env="math"):
    """The rows as plain lists; tool results are scored by the trainer and not trained."""
    response = slice(PROMPT, None)
    columns = {
        "response": step.tokens[:, response],
        "loss": step.wide(step.mask.astype(int), 0)[:, response],
        "infer": step.wide(step.infer, 0.0)[:, response],
        "train": step.wide(step.train, -2.5)[:, response],
    }
    envs = step.labels.get("env", [env] * step.size)
    return [
        formats.Sequence(
            prompt=step.tokens[s, :PROMPT].tolist(),
            **{n: column[s].tolist() for n, column in columns.items()},
            env=envs[s],
        )
        for s in range(step.size)
    ]


def own(folder, step):
    Writer(folder).step(
        step.number,
        step.tokens,
        step.wide(step.mask, False),
        step.wide(step.train, np.nan),
        step.wide(step.infer, np.nan),
        groups=step.groups,
        labels=step.labels or None,
        staleness=step.age,
    )


def nemo(folder, step):
    formats.nemo(folder, _sequences(step), step.number)


def prime_rl(folder, step):
    rows = _sequences(step)
    ranks = step.labels.get("rank", ["0"] * step.size)
    for rank in sorted({*ranks}):
        mine = [row for row, own in zip(rows, ranks, strict=True) if own == rank]
        formats.prime(folder, mine, step.number, rank)


def _samples(step):
    names = {"loss": "loss_masks", "train": "log_probs", "infer": "rollout_log_probs"}
    return [
        {
            "tokens": row.tokens,
            "response_lengths": len(row.response),
            "sample_index": s,
            **{name: getattr(row, of) for of, name in names.items()},
            **({"source_names": row.env} if "env" in step.labels else {}),
        }
        for s, row in enumerate(_sequences(step))
    ]


def _saved(folder, name, payload):
    import torch

    (folder / "train_data").mkdir(exist_ok=True, parents=True)
    torch.save(payload, folder / "train_data" / f"{name}.pt")


def slime(folder, step):
    payload = {"format_version": 2, "rollout_id": step.number, "samples": _samples(step)}
    _saved(folder, step.number, payload)


def miles(folder, step):
    samples = _samples(step)
    columns = {name: [sample[name] for sample in samples] for name in samples[0]}
    columns["sample_indices"] = columns.pop("sample_index")
    if step.age is not None:  # miles counts the updates that the sampling engine had received
        columns["weight_versions"] = [[str(step.number + 9 - int(age))] for age in step.age]
    payload = {"rollout_id": step.number, "rank": 0, "rollout_data": columns}
    _saved(folder, f"{step.number}_0", payload)


def skyrl(folder, step):
    response = slice(PROMPT, None)
    mask = step.wide(step.mask, False)[:, response]
    columns = {
        "sequences": step.tokens,
        "attention_mask": np.ones_like(step.tokens),
        "response_mask": np.ones_like(mask, dtype=np.int64),
        "loss_mask": mask.astype(np.float32),
        "action_log_probs": step.wide(step.train, -2.5)[:, response],
        "rollout_logprobs": step.wide(step.infer, 0.0)[:, response],
    }
    (folder / "dumped_data").mkdir(exist_ok=True, parents=True)
    path = folder / "dumped_data" / f"global_step_{step.number}_training_input.pkl"
    path.write_bytes(formats.sky_bytes(columns, pad_size=0))


WRITERS = {
    "own": own,
    "nemo": nemo,
    "prime-rl": prime_rl,
    "slime": slime,
    "miles": miles,
    "skyrl": skyrl,
}
