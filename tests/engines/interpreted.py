# The exact metrics of tensors, in this process or in one where Triton interprets its kernels.
#
# Triton reads TRITON_INTERPRET once, when kernels are defined, so a process has one or the other.

import os
import pickle
import subprocess
import sys
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import torch

from servanda.engines import tensor_sums


def worked(train_RV, infer_RV, dtype, token_R=None, cuts=(), device="cpu"):
    """Every metric and every sum of each row, as arrays.

    Args:
        train_RV, infer_RV: float64 arrays that the type holds exactly.
        cuts: where the vocabulary is cut into shards; they are added up from the last to the first.
    """
    train, infer = (
        torch.from_numpy(side).to(device, getattr(torch, dtype)) for side in (train_RV, infer_RV)
    )
    token = None if token_R is None else torch.from_numpy(token_R).to(device)
    if cuts:
        edges = [0, *cuts, train.shape[1]]
        shards = [(train[:, i:j], infer[:, i:j], i) for i, j in pairwise(edges)]
        first, *others = [
            tensor_sums.normaliser_of(a, b, start=start) for a, b, start in reversed(shards)
        ]
        whole = sum(others, first)
        sums = tensor_sums.finished(
            sum(tensor_sums.partial_sums(a, b, whole) for a, b, _ in shards), whole
        )
    else:
        sums = tensor_sums.row_sums_of(train, infer, token)
    found = {name: value.cpu().numpy() for name, value in sums.items()}
    return found | tensor_sums.metrics_of(sums)


def hidden_case():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(12, 8, dtype=torch.float64, generator=generator)
    head = torch.randn(200, 8, dtype=torch.float64, generator=generator)
    return hidden, (head, head + 1e-3), torch.arange(12) * 17 % 200


@contextmanager
def interpreter():
    """`worked` by the interpreted kernels, whose `span` and `block` may be given, too."""
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "tests.engines.interpreted"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=env | {"OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[2],
    ) as child:

        def ask(*args, **kwargs):
            pickle.dump((args, kwargs), child.stdin)
            child.stdin.flush()
            return pickle.load(child.stdout)

        yield ask
        child.stdin.close()


if __name__ == "__main__":
    kernels = tensor_sums.triton_kernels
    assert kernels.INTERPRETED
    own = kernels.SPAN, kernels.BLOCK
    while True:
        try:
            args, kwargs = pickle.load(sys.stdin.buffer)
        except EOFError:
            break
        kernels.SPAN, kernels.BLOCK = kwargs.pop("span", own[0]), kwargs.pop("block", own[1])
        pickle.dump(worked(*args, **kwargs), sys.stdout.buffer)
        sys.stdout.buffer.flush()
