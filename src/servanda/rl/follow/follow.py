# Follow: the scores of a run's syncs, and the conclusion after each.

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from servanda.errors import ContractError, EvidenceError, MeasurementError
from servanda.rl.follow.follow_step import FollowStep, Question, ReplicaFollow, ScoreHistory, Scores
from servanda.rl.sync_drill.vocabulary import drawn, named_ids, size_of
from servanda.theory.sampling import Floats
from servanda.theory.stats.alpha import shared

# The probe tokens of a run: many short rows, because a row is the unit of the statistics.


ROWS, TOKENS = 64, 11  # 640 scored tokens
FEWEST = 24  # rows; with fewer, no interval is finite for long


def rows_of(source: Any, seed: int = 0) -> list[list[int]]:
    """The rows that both sides score.

    Args:
        source: rows of token ids; or a torch module, or the size of its vocabulary, for which 640
            tokens are drawn, evenly over the vocabulary.

    Raises:
        ContractError: too few rows, a row without a scored token, other values than token ids, or
            no known vocabulary.
    """
    if not isinstance(source, Sequence):
        size = source if isinstance(source, int) else size_of(source)
        if size is None:
            raise ContractError(
                f"the vocabulary size of {type(source).__name__} is unknown, so no probe tokens "
                "can be chosen",
                hint="pass rows of token ids, or the size of the vocabulary",
            )
        named = [] if isinstance(source, int) else named_ids(source, size)
        return drawn(size, named, ROWS, TOKENS, seed)
    try:
        rows = [[int(token) for token in row] for row in source]
    except (TypeError, ValueError):
        raise ContractError(
            "the probe tokens are not rows of token ids",
            hint="pass rows such as [[1, 2, 3], ...], a module, or the size of its vocabulary",
        ) from None
    short = next((i for i, row in enumerate(rows, 1) if len(row) < 2), None)
    if short is not None:
        raise ContractError(
            f"row {short} of the probe tokens has {len(rows[short - 1])}: the first token of a row "
            "is not scored",
            hint="use rows of two tokens or more",
        )
    if len(rows) < FEWEST:
        raise ContractError(
            f"{len(rows)} rows of probe tokens, and at least {FEWEST} are needed: a row is the "
            "unit of the statistics",
            hint=f"use many short rows; {ROWS} rows of {TOKENS} tokens are enough",
        )
    return rows


SCHEMA = 1
ONLY = "engine"  # the name of an engine that is the only one
_LIMIT = 0.05
_SPARSE = 2  # lines of a file per kept sync, before it is written anew

RowScores = Sequence[Any]


class Follow:
    """Whether engines follow a trainer during a run, by the same tokens after each sync.

    Call `observe` once before the first update, and after each sync or each K-th.  In a run of
    several ranks one rank does.

    Args:
        probes: rows of token ids; or a torch module, or the size of its vocabulary, for which 640
            tokens are drawn.
        limit: largest |slope - 1| of an engine that follows.
        confidence: that of all conclusions of the run together.
        every: number of updates between two observations by a trainer's hook, such as that of TRL.
        state: a file of JSON lines with the scores, which a restart continues.
        seed: seed of drawn probes.

    Raises:
        ContractError: unusable probes, or numbers outside their range.
        EvidenceError: the state file is not one of a follow, or of other probes.
        MeasurementError: it cannot be read.
    """

    def __init__(
        self,
        probes: Any,
        *,
        limit: float = _LIMIT,
        confidence: float = 0.95,
        every: int = 1,
        state: str | Path | None = None,
        seed: int = 0,
    ) -> None:
        for name, value in (("limit", limit), ("confidence", confidence)):
            if not 0 < value < 1:
                raise ContractError(f"{name} is {value!r}", hint="a number between 0 and 1")
        if every < 1:
            raise ContractError(f"every is {every!r}", hint="a number of updates, such as 1")
        self.probes, self.every = rows_of(probes, seed), every
        self.limit, self.alpha = limit, 1 - confidence
        sizes = [len(row) - 1 for row in self.probes]
        self.start_U = np.cumsum([0, *sizes[:-1]])
        self.tokens = sum(sizes)
        self._path = None if state is None else Path(state)
        self._history, self._lines = ScoreHistory(), 0
        self._names: tuple[str, ...] = ()
        if self._path is not None and self._path.exists():
            self._read(self._path)

    def observe(
        self,
        version: int,
        logp_train: RowScores,
        logp_infer: RowScores | Mapping[str, RowScores],
        *,
        parts: Mapping[str, RowScores] | Callable[[], Mapping[str, RowScores]] | None = None,
    ) -> FollowStep:
        """Compare the engines with the trainer after a sync.

        A score is the logprob of each token of a probe row except the first, nats; NaN is a
        missing one.  Both sides score at temperature 1 and over the whole vocabulary.

        Args:
            version: number of updates of the trainer.
            logp_train: the trainer's scores, one array per row, with the weights as they are sent:
                see servanda.rl.follow.sent_weights.SentWeights.
            logp_infer: the engine's scores; of several engines, replica -> scores.
            parts: group of weights -> the trainer's scores with this group as it was at the first
                `observe`, such as StaleParts.scores; a function is called only if an engine does
                not follow.

        Raises:
            EvidenceError: scores that do not fit the probe rows, or are no logprobs.
        """
        infer = logp_infer if isinstance(logp_infer, Mapping) else {ONLY: logp_infer}
        notes = []
        if dropped := self._history.forget_from(version):
            notes.append(f"the scores of {dropped} syncs from version {version} on are replaced")
        scores = Scores(
            self._history.looks,
            version,
            self._flat(logp_train, "the trainer"),
            {name: self._flat(rows, f"replica {name!r}") for name, rows in infer.items()},
        )
        if 0 not in self._history.kept:  # a run that was begun anew
            self._history = ScoreHistory()
            scores = Scores(0, version, scores.train_N, scores.infer)
        self._history.add(scores)
        self._names = tuple(dict.fromkeys((*self._names, *infer)))
        known = parts if isinstance(parts, Mapping) else {}
        replicas = self._judged(known)
        if callable(parts) and any(f.outcome == "violated" for f in replicas.values()):
            replicas = self._judged(parts())
        scores = replace(
            scores,
            violated=tuple(n for n, f in replicas.items() if f.outcome == "violated"),
            again={name: found.again for name, found in replicas.items() if found.again},
        )
        for name, (_, first) in scores.again.items():
            since = self._history.kept[first].version
            notes.append(f"{name} follows again since version {since}")
        self._history.add(scores)
        self._write(scores, notes)
        return FollowStep(version, replicas, self.tokens, tuple(notes))

    def _judged(self, parts: Mapping[str, RowScores]) -> dict[str, ReplicaFollow]:
        question = Question(
            self._history.kept,
            self.start_U,
            shared(self.alpha, len(self._names)),
            self.limit,
            {name: self._flat(rows, f"part {name!r}") for name, rows in parts.items()},
        )
        return {name: question.about(name) for name in self._names}

    def _flat(self, rows: RowScores, side: str) -> Floats:
        """The scores of all rows, [N]; infinite ones are missing."""
        given = [] if rows is None else list(rows)
        if len(given) != len(self.probes):
            raise EvidenceError(
                f"{side} scored {len(given)} rows, and there are {len(self.probes)} probe rows",
                hint="give one array per row of follow.probes, in this order",
            )
        flat: list[Floats] = []
        for number, (row, scores) in enumerate(zip(self.probes, given, strict=True), 1):
            if hasattr(scores, "detach"):
                scores = scores.detach().float().cpu().numpy()
            try:
                logp_T = np.asarray(scores, dtype=np.float64)
            except (TypeError, ValueError) as error:
                raise EvidenceError(
                    f"{side}, row {number}: these are no logprobs: {error}",
                    hint="give an array of numbers, in nats, NaN for missing ones",
                ) from None
            if logp_T.shape != (len(row) - 1,):
                raise EvidenceError(
                    f"{side} gave row {number} logprobs of shape {logp_T.shape}, and it has "
                    f"{len(row)} tokens",
                    hint=f"give {len(row) - 1} of them: one for each token but the first",
                )
            if (logp_T > 1e-3).any():
                raise EvidenceError(
                    f"{side} gave row {number} a logprob of {np.nanmax(logp_T):g}",
                    hint="a logprob is at most 0: are these losses, or probabilities?",
                )
            flat.append(np.where(np.isfinite(logp_T), logp_T, np.nan))
        # as stored, so that a restart computes the same
        return np.concatenate(flat).astype(np.float32).astype(np.float64)

    def _write(self, scores: Scores, notes: list[str]) -> None:
        """Append the scores; a full disk gives a note, and stops no run."""
        if self._path is None:
            return
        kept, head = self._history.kept, {"schema": SCHEMA, "follow": self.tokens}
        anew = scores.look == 0 or self._lines > _SPARSE * len(kept)
        new = kept.values() if anew else (scores,)
        lines = [json.dumps({**head, **one.to_plain()}) + "\n" for one in new]
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if anew:  # complete or as before, whenever the process is killed
                beside = self._path.with_name(f"{self._path.name}.new")
                beside.write_text("".join(lines), encoding="utf-8")
                beside.replace(self._path)
            else:
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(lines[0])
        except OSError as error:
            notes.append(f"the scores of version {scores.version} were not written: {error}")
            return
        self._lines = len(lines) if anew else self._lines + 1

    def _read(self, path: Path) -> None:
        hint = "name another state file"
        with MeasurementError.of_system(f"the state file {path} cannot be used", hint=hint):
            data = path.read_bytes()
        lines = data[: data.rfind(b"\n") + 1].splitlines()
        for number, line in enumerate(lines, 1):
            try:
                plain = json.loads(line)
                EvidenceError.refuse_form(f"{path}:{number}", plain["schema"], SCHEMA, hint)
                if plain["follow"] != self.tokens:
                    raise ValueError(f"it is of {plain['follow']} probe tokens")
                scores = Scores.from_plain(plain)
            except (KeyError, TypeError, ValueError) as error:
                raise EvidenceError(
                    f"{path}:{number} is no line of this follow: {error}", hint=hint
                ) from None
            self._history.forget_from(scores.version)
            self._history.add(scores)
            self._names = tuple(dict.fromkeys((*self._names, *scores.infer)))
        self._lines = len(lines)
        if len(data) > sum(map(len, lines)) + len(lines):  # a line that was cut off
            with path.open("r+b") as file:
                file.truncate(data.rfind(b"\n") + 1)
