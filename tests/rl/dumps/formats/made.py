# Dumps as frameworks write them, of sequences that are known; by hand, one function a format.

import json
import pickle
import sys
import types
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

import numpy as np

DATA = Path(__file__).parent / "data"


@dataclass(frozen=True)
class Sequence:
    prompt: list
    response: list
    loss: list
    infer: list
    train: list
    reward: float = 1.0
    advantage: float = 0.5
    env: str = "math"

    @property
    def tokens(self):
        return [*self.prompt, *self.response]

    def whole(self, column, fill=0.0):
        """A column of the response over all tokens."""
        return [fill] * len(self.prompt) + list(column)


EXPECTED = [Sequence(**s) for s in json.loads((DATA / "expected.json").read_text())]


def sequences(count, seed=0, longest=12):
    """Random sequences of one turn."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        response = int(rng.integers(2, longest))
        infer = -rng.exponential(1.0, response)
        made.append(
            Sequence(
                prompt=rng.integers(0, 50, int(rng.integers(1, 4))).tolist(),
                response=rng.integers(0, 50, response).tolist(),
                loss=[1] * response,
                infer=infer.tolist(),
                train=(infer - 0.01).tolist(),
            )
        )
    return made


def nemo_row(sequence, width, **changes):
    """A line of NeMo-RL, as plain data."""

    def padded(values, fill=0.0):
        return [[*values, *[fill] * (width - len(values))]]

    loss = sequence.loss
    row = {
        "content": ["text"],
        "rewards": [sequence.reward],
        "input_lengths": [len(sequence.tokens)],
        "token_ids": padded(sequence.tokens, 0),
        "token_loss_mask": padded(sequence.whole([float(m) for m in loss])),
        "sample_loss_mask": [1.0],
        "advantages": padded([sequence.advantage] * width),
        "generation_logprobs": padded(
            sequence.whole([a if m else 0.0 for a, m in zip(sequence.infer, loss, strict=True)])
        ),
        "prev_logprobs": padded([0.0, *sequence.whole(sequence.train, -2.5)[1:]], -0.0),
        "idx": 0,
        "agent_ref": [{"name": sequence.env}],
    }
    row = {**row, **changes}
    return {name: value for name, value in row.items() if value is not ...}


def nemo_text(many, **changes):
    width = max(len(s.tokens) for s in many) + 3
    return "".join(json.dumps(nemo_row(s, width, **changes)) + "\n" for s in many)


def nemo(folder, many=EXPECTED, step=3, **changes):
    Path(folder).mkdir(exist_ok=True, parents=True)
    path = Path(folder) / f"train_data_step{step}.jsonl"
    path.write_text(nemo_text(many, **changes))
    return path


def prime_row(sequence, **changes):
    """A line of prime-rl, as plain data."""
    tokens = len(sequence.tokens)
    row = {
        "schema_version": 1,
        "step": 3,
        "rank": 0,
        "env_name": sequence.env,
        "token_ids": sequence.tokens,
        "position_ids": list(range(tokens)),
        "loss_mask": sequence.whole([bool(m) for m in sequence.loss], False),
        "advantages": [sequence.advantage] * tokens,
        "inference_logprobs": sequence.whole(sequence.infer),
        "trainer_logprobs": [-9.0, *sequence.whole(sequence.train, -2.5)[1:]],
        "entropy": [0.7] * tokens,
        "mismatch_kl": [None] * tokens,
        "rl_weights": [None] * tokens,
    }
    row = {**row, **changes}
    return {name: value for name, value in row.items() if value is not ...}


def prime(folder, many=EXPECTED, step=3, rank=0, stable=True, **changes):
    inside = Path(folder) / "token_exports" / f"step_{step}"
    inside.mkdir(exist_ok=True, parents=True)
    path = inside / f"rank_{rank}.jsonl"
    path.write_text("".join(json.dumps(prime_row(s, **changes)) + "\n" for s in many))
    if stable:
        (inside / "STABLE").touch()
    return path


class _Rebuilt(dict):
    """Pickled as SkyRL's batch is: a call of that function with that class and the state."""

    def __reduce__(self):
        return _rebuild_tensor_batch, (TrainingInputBatch, dict(self))


def _rebuild_tensor_batch(cls, state):
    raise AssertionError


class TrainingInputBatch:
    pass


def sky_bytes(columns, **metadata):
    """A batch of SkyRL as `TensorBatch.save` pickles it; None and dicts are kept as they are."""
    name = "skyrl_train.training_batch"
    module = types.ModuleType(name)
    for thing in (_rebuild_tensor_batch, TrainingInputBatch):
        thing.__module__ = name
        setattr(module, thing.__name__, thing)
    held = {
        key: {
            "format": "numpy",
            "data": value.tobytes(),
            "shape": value.shape,
            "dtype": str(value.dtype),
        }
        if isinstance(value, np.ndarray)
        else value
        for key, value in columns.items()
    }
    with patch.dict(sys.modules, {"skyrl_train": types.ModuleType("skyrl_train"), name: module}):
        state = {"batch_dict": held, "batch_size": len(columns["sequences"])}
        return pickle.dumps(_Rebuilt(**state, device=None, metadata=metadata))


@dataclass
class Read:
    """What came out of a dump, sequence by sequence."""

    rows: list = field(default_factory=list)
    steps: list = field(default_factory=list)


def read(dump):
    """Each sequence of a dump as a dict of its columns."""
    out = Read()
    for chunk in dump.read():
        out.steps.append(chunk.step)
        for at, start in enumerate(chunk.start_S.tolist()):
            part = slice(start, start + int(chunk.length_S[at]))
            out.rows.append(
                {
                    "tokens": chunk.token_N[part].tolist(),
                    "mask": chunk.mask_N[part].tolist(),
                    "train": chunk.logp_train_N[part],
                    "infer": chunk.logp_infer_N[part],
                    "group": chunk.group_S[at],
                    "source": chunk.source_S[at],
                    **{name: values[at] for name, values in chunk.labels.items()},
                    **{name: float(values[at]) for name, values in chunk.per_sequence.items()},
                    **{name: values[part] for name, values in chunk.per_token.items()},
                }
            )
    return out
