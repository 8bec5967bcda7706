# What a broken sync carries to its engine, by the names of an architecture: one table of faults for
# sharded trainers, servers and replicas.
#
# A `take` is a function of an engine with `models`, `sent` and `syncs`, as in
# tests.rl.sync_drill.broken.

from typing import NamedTuple

import torch

from tests.rl.sync_drill.broken import (
    late,
    load,
    swapped,
    times,
    transposed,
    unless,
    without,
    without_rows,
)


class Names(NamedTuple):
    """Parts of the names of an architecture of two layers.

    Args:
        attention: of a layer's attention; norm: of a layer's first norm.
        matrix: the last one of an MLP, in a layer.
        square: a square matrix in a layer.
        embed: the embedding, which is also the head.
        rows: its number of rows.
        of: before the number of a layer.
    """

    attention: str
    norm: str
    matrix: str
    square: str
    embed: str
    rows: int
    of: str = "layers"


class Carried(NamedTuple):
    """A fault: how it is put, what a preflight test calls it, and what the engine takes."""

    how: str
    cause: str
    take: object


def _rounded(weights):
    """Matrices of the precision of float8."""
    for name, tensor in weights.items():
        if tensor.dim() > 1:
            weights[name] = tensor.to(torch.float8_e4m3fn).to(tensor.dtype)


def carried(n):
    """Fault -> Carried, for the names of an architecture."""
    layer, last = f"{n.of}.1", n.rows
    return {
        "never_synced": Carried("nothing arrives", "never_synced", unless(lambda _: True)),
        "one_layer": Carried("a layer is left out", "one_layer", without(f"{layer}.")),
        "one_mlp": Carried("the MLP of a layer is left out", "one_mlp", without(f"{layer}.mlp.")),
        "one_attention": Carried(
            "the attention of a layer is left out",
            "one_attention",
            without(f"{layer}.{n.attention}."),
        ),
        "one_matrix": Carried("a matrix is left out", "deaf", without(f"{layer}.{n.matrix}")),
        "norms_stale": Carried("the norms are left out", "norms_stale", without("norm")),
        "one_norm": Carried("one norm is left out", "deaf", without(f"{layer}.{n.norm}")),
        "last_row": Carried(
            "the last row of the vocabulary is left out",
            "rows_stale",
            without_rows(last - 1, last, n.embed),
        ),
        "first_rows": Carried(
            "the first two rows are left out", "rows_stale", without_rows(0, 2, n.embed)
        ),
        "late": Carried("a sync sends the weights of the one before", "late", late("")),
        "two_late": Carried("the weights of two syncs ago", "late", late("", ago=2)),
        "norms_late": Carried("the norms alone come a sync late", "dropped", late("norm")),
        "even_dropped": Carried(
            "every second sync is dropped", "dropped", unless(lambda k: k % 2 == 0)
        ),
        "odd_dropped": Carried("the others are dropped", "dropped", unless(lambda k: k % 2)),
        "stopped": Carried("after six syncs none arrives", "stopped", unless(lambda k: k > 6)),
        "scaled_down": Carried("a matrix of each MLP times 0.9", "scaled", times(0.9, n.matrix)),
        "scaled_up": Carried(
            "the attention of a layer times 1.05",
            "scaled",
            times(1.05, f"{n.of}.0.{n.attention}"),
        ),
        "swapped": Carried(
            "a matrix of two layers is swapped",
            "sync_moves",
            swapped(f"{n.of}.0.{n.square}", f"{layer}.{n.square}"),
        ),
        "transposed": Carried(
            "a square matrix is transposed", "sync_moves", transposed(f"{n.of}.0.{n.square}")
        ),
        "float8": Carried(
            "the matrices are rounded to float8",
            "wrong_cast",
            lambda engine: load(engine, _rounded),
        ),
    }


TOY = Names("attn", "norm", "mlp.2.weight", "attn.weight", "embed.weight", 23)
