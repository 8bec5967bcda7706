# The subject of the test: a trainer's module, its sync, and the scoring functions of both sides.
#
# Rows are token ids; a score is the logprob, in nats, of each token of a row except the first.

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from servanda.errors import MeasurementError
from servanda.rl.sync_drill.signals import TIMEOUT_S
from servanda.rl.sync_drill.vocabulary import drawn, named_ids, size_of
from servanda.theory.sampling import Floats

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from servanda.rl.sync_drill.servers.replicas import Replicas

Rows = list[list[int]]
Score = Callable[[Rows], Sequence[Any]]

ROWS, TOKENS = 16, 41  # default probes: 640 scored tokens
FEWEST = 64  # fewest scored tokens for a slope
_FED = 1024  # tokens of a forward pass of the default `logprobs`


@dataclass(frozen=True)
class Trainee:
    """A trainer and its engine, the subject of the preflight sync test.

    Args:
        module: the torch module whose parameters with requires_grad the trainer updates.
        sync: the call that copies the weights to the engine after an update.
        score: rows of token ids -> the engine's logprobs of each row's tokens except the first,
            at temperature 1, over the whole vocabulary.
        tokens: rows to score; None samples 640 tokens from the whole vocabulary.
        logprobs: like `score`, for the trainer, in the modes that the module has; None runs the
            module's forward pass in evaluation mode.
        replicas: servers behind `score`, each of which is tested by its own scores; see from_urls.
    """

    module: nn.Module
    sync: Callable[[], Any]
    score: Score
    tokens: Sequence[Sequence[int]] | None = None
    logprobs: Score | None = None
    replicas: Replicas | None = None

    @classmethod
    def from_urls(
        cls,
        module: nn.Module,
        urls: str | Sequence[str],
        *,
        sync: Callable[[], Any],
        tokens: Sequence[Sequence[int]] | None = None,
        logprobs: Score | None = None,
        served: str | None = None,
        key_env: str | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> Trainee:
        """A trainer whose engine is one or more running servers; each URL is a replica.

        Args:
            sync, tokens, logprobs: see Trainee.
            urls: such as http://127.0.0.1:8000, of servers that give logprobs of a prompt (vLLM,
                SGLang, `servanda tools serve-kernel`).
            served: their name of the model, if they have several.
            key_env: environment variable with their API key.
            timeout_s: silence after which a server is given up, seconds.

        Raises:
            MeasurementError: a server does not answer, or gives no logprobs of a prompt.
        """
        from servanda.rl.sync_drill.servers.replicas import opened_at

        servers = opened_at(urls, served=served, dialect=None, key_env=key_env, timeout_s=timeout_s)
        return cls(module, sync, servers.score, tokens, logprobs, servers)

    @classmethod
    def from_vllm(
        cls,
        module: nn.Module,
        urls: str | Sequence[str],
        *,
        sync: Callable[[], Any] | None = None,
        folder: str | Path | None = None,
        tokens: Sequence[Sequence[int]] | None = None,
        logprobs: Score | None = None,
        served: str | None = None,
        key_env: str | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> Trainee:
        """As from_urls, for vLLM.

        Args:
            sync: the trainer's own; None saves the module as a checkpoint and lets each server
                load it by `reload_weights` (needs VLLM_SERVER_DEV_MODE=1).
            folder: where that checkpoint is written for a moment, seen by the servers too; None is
                the system's folder of temporary files.

        Raises:
            MeasurementError: as from_urls.
        """
        from servanda.rl.sync_drill.servers.checkpoint_sync import opened_for

        servers, own = opened_for(
            "vllm", module, urls, folder, served=served, key_env=key_env, timeout_s=timeout_s
        )
        return cls(module, sync or own, servers.score, tokens, logprobs, servers)

    @classmethod
    def from_sglang(
        cls,
        module: nn.Module,
        urls: str | Sequence[str],
        *,
        sync: Callable[[], Any] | None = None,
        folder: str | Path | None = None,
        tokens: Sequence[Sequence[int]] | None = None,
        logprobs: Score | None = None,
        served: str | None = None,
        key_env: str | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> Trainee:
        """As from_vllm, for SGLang, which loads the checkpoint by `/update_weights_from_disk`.

        Raises:
            MeasurementError: as from_urls.
        """
        from servanda.rl.sync_drill.servers.checkpoint_sync import opened_for

        servers, own = opened_for(
            "sglang", module, urls, folder, served=served, key_env=key_env, timeout_s=timeout_s
        )
        return cls(module, sync or own, servers.score, tokens, logprobs, servers)

    @classmethod
    def from_fsdp(
        cls,
        module: nn.Module,
        sync: Callable[[], Any],
        score: Score,
        tokens: Sequence[Sequence[int]] | None = None,
        logprobs: Score | None = None,
    ) -> Trainee:
        """A trainer that FSDP2's fully_shard, or a device mesh, shards over a process group.

        Every rank calls `preflight` with its own; each changes and restores only its shards, and
        all get the same result.  `sync` and `logprobs` are called on every rank at the same time,
        `score` on rank 0 alone.

        Raises:
            MeasurementError: the module has no DTensor, or there is no process group.
        """
        from servanda.rl.sync_drill.parallel.shards import refuse_whole

        refuse_whole(module)
        return cls(module, sync, score, tokens, logprobs)

    @classmethod
    def from_deepspeed(
        cls,
        engine: Any,
        sync: Callable[[], Any],
        score: Score,
        tokens: Sequence[Sequence[int]] | None = None,
        logprobs: Score | None = None,
    ) -> Trainee:
        """A trainer that DeepSpeed's ZeRO-3 shards: the engine that `deepspeed.initialize` returns.

        Called on every rank, as `from_fsdp`.  Stages below 3 leave the module whole on every rank:
        there, rank 0 alone calls `preflight(Trainee(...))`, if its sync needs no other rank.

        Raises:
            MeasurementError: no parameter is sharded, or there is no process group.
        """
        return cls.from_fsdp(engine.module, sync, score, tokens, logprobs)


def probes(trainee: Trainee, seed: int) -> Rows:
    """The rows that both sides score.

    Raises:
        MeasurementError: too few tokens, an id outside the vocabulary, or neither tokens nor a
            known vocabulary.
    """
    known = size_of(trainee.module)
    if trainee.tokens is None:
        if known is None:
            raise MeasurementError(
                f"the vocabulary size of {type(trainee.module).__name__} is unknown, so no probe "
                "tokens can be chosen",
                hint="pass Trainee(tokens=...): rows of token ids",
            )
        return drawn(known, named_ids(trainee.module, known), ROWS, TOKENS, seed)
    return checked_rows(trainee.tokens, known)


def checked_rows(tokens: Sequence[Sequence[int]], known: int | None) -> Rows:
    """Rows of token ids that can be scored.

    Args:
        known: size of the vocabulary; None if it is unknown.

    Raises:
        MeasurementError: as of `probes`.
    """
    rows = [[int(token) for token in row] for row in tokens]
    for number, row in enumerate(rows, 1):
        strange = [token for token in row if token < 0 or (known is not None and token >= known)]
        if strange:
            raise MeasurementError(
                f"row {number} of the probe tokens has token {strange[0]}"
                + (f", and the vocabulary has {known:,}" if known is not None else ""),
                hint="use ids of the module's own tokenizer, without padding such as -100",
            )
        if len(row) < 2:
            raise MeasurementError(
                f"row {number} of the probe tokens has {len(row)}: the first token of a row is "
                "not scored",
                hint="use rows of two tokens or more",
            )
    scored = sum(len(row) - 1 for row in rows)
    if scored < FEWEST:
        raise MeasurementError(
            f"too few probe tokens: {scored} are scored, and {FEWEST} are needed",
            hint=f"use more rows, or longer ones; {ROWS} rows of {TOKENS} tokens are enough",
        )
    return rows


def forward_logprobs(module: Any, rows: Rows) -> list[Floats]:
    """Logprobs of each row's tokens except the first, by a causal model's forward pass.

    Rows of one length are batched without padding.  The softmax is computed in float32, or in
    float64 for float64 logits.
    """
    import torch

    first = next(module.parameters())
    # of a sharded parameter that is offloaded to the host, the device of the computation
    device = first.device_mesh.device_type if hasattr(first, "to_local") else first.device
    scores: dict[int, Floats] = {}
    for at in _chunks(rows):
        ids = torch.tensor([rows[i] for i in at], device=device)
        with torch.no_grad():
            answer: Any = module(ids)
        logits: Any = answer if isinstance(answer, torch.Tensor) else answer.logits
        logits = (logits.full_tensor() if hasattr(logits, "to_local") else logits).detach()
        for i, logits_TV in zip(at, logits, strict=True):
            wide = logits_TV[:-1].to(torch.promote_types(logits_TV.dtype, torch.float32))
            next_T1 = torch.tensor(rows[i][1:], device=device)[:, None]
            logp_T = wide.log_softmax(dim=-1).gather(1, next_T1)[:, 0]
            scores[i] = logp_T.double().cpu().numpy()
    return [scores[i] for i in range(len(rows))]


def _chunks(rows: Rows) -> Iterator[list[int]]:
    """Batches of row indexes of one length, with a limited number of tokens."""
    lengths: dict[int, list[int]] = {}
    for number, row in enumerate(rows):
        lengths.setdefault(len(row), []).append(number)
    for length, at in lengths.items():
        most = max(1, _FED // length)
        yield from (at[i : i + most] for i in range(0, len(at), most))


def train_scores(trainee: Trainee, rows: Rows, own_modes: bool = False) -> Sequence[Any]:
    """The trainer's scores, without a graph; without dropout, or in the module's own modes."""
    import torch

    with modes_kept(trainee.module), torch.no_grad():
        if not own_modes:
            trainee.module.eval()
        if trainee.logprobs is not None:
            return trainee.logprobs(rows)
        return forward_logprobs(trainee.module, rows)


@contextmanager
def modes_kept(module: nn.Module) -> Iterator[None]:
    """Restore torch's gradient mode and the training mode of each module afterwards.

    An interrupt between two instructions can skip the end of a `with torch.no_grad()`.
    """
    import torch

    recorded = torch.is_grad_enabled()
    modes = [(part, part.training) for part in module.modules()]
    try:
        yield
    finally:
        torch.set_grad_enabled(recorded)
        for part, training in modes:
            part.training = training


def flat(answer: Any, rows: Rows, side: str, stage: str) -> Floats:
    """Scores of all rows in one array, [N], nats.

    Raises:
        MeasurementError: rows or tokens are missing, or a score is not a finite logprob.
    """
    place = f"{stage}: {side}"
    answers = list(answer) if answer is not None else []
    if len(answers) != len(rows):
        raise MeasurementError(
            f"{place} scored {len(answers)} rows, and was asked for {len(rows)}",
            hint="score must return one array a row, in the rows' order",
        )
    parts = []
    for number, (row, given) in enumerate(zip(rows, answers, strict=True), 1):
        logp_T = _array(given, f"{place}, row {number}")
        if logp_T.shape != (len(row) - 1,):
            raise MeasurementError(
                f"{place} gave row {number} logprobs of shape {logp_T.shape}, and it has "
                f"{len(row)} tokens",
                hint=f"give {len(row) - 1} of them: one for each token but the first",
            )
        bad = np.flatnonzero(~np.isfinite(logp_T) | (logp_T > 1e-3))
        if bad.size:
            raise MeasurementError(
                f"{place} gave row {number}, token {bad[0] + 2} a logprob of {logp_T[bad[0]]:g}",
                hint="a missing logprob is no evidence: score every token, over the whole "
                "vocabulary, in nats",
            )
        parts.append(logp_T)
    return np.concatenate(parts)


def _array(given: Any, place: str) -> Floats:
    if hasattr(given, "detach"):
        given = given.detach().double().cpu().numpy()
    try:
        # None becomes NaN, which is rejected with its place
        return np.asarray(given, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise MeasurementError(
            f"{place}: these are no logprobs: {error}", hint="give an array of numbers, in nats"
        ) from None
