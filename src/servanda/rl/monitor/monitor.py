# The monitor: judges the tokens of every training step as `servanda check` does.

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from servanda.contract.model import WHOLE, Contract
from servanda.errors import ContractError, EvidenceError, ServandaError
from servanda.judgement.clauses.gradient import psi_of
from servanda.judgement.clauses.token_counts import is_answered
from servanda.judgement.plan import Plan
from servanda.judgement.slices.rules import Cut
from servanda.rl.dumps.statistics import tv_limit
from servanda.rl.follow.follow_step import FollowStep
from servanda.rl.monitor import ranks
from servanda.rl.monitor.batch import Array, Batch, DeviceBatch, batch_of, turned
from servanda.rl.monitor.ranks import (
    Gather,
    Opening,
    Overlaps,
    Part,
    part_of,
    rollouts_of,
    sample_problems,
)
from servanda.rl.monitor.state_file import Journal, RunState, first_line
from servanda.rl.monitor.statistics import Meter, StepStatistics, draft_counts, overlaps
from servanda.rl.monitor.step import (
    Step,
    action_metrics,
    cause_text,
    check_selection,
    due_actions,
    judged,
    metrics_of,
    of_cells,
    state_line,
    token_weights,
)
from servanda.rl.steps.blocks import FILLED, paired
from servanda.rl.steps.causes import STEP_TOKENS, RunCauses
from servanda.rl.steps.contract import Counts, RunContract, labels_of, plan_of
from servanda.rl.steps.drift import TokenSum
from servanda.rl.steps.judge import StepJudge
from servanda.rl.trend.changes import chart_of
from servanda.theory.sampling import uniforms
from servanda.theory.stats.draft_counts import DraftCounts

# The sampled share: sequences that are stored completely, for `servanda check DIR`.
#
# They are chosen by the step and their index alone, before any of their data is examined.


class SampleDump:
    """Writes a share of each step's sequences.

    Args:
        share: share of the sequences, above 0 and at most 1.

    Raises:
        EvidenceError: an invalid share.
    """

    def __init__(self, folder: Path, share: float, seed: int) -> None:
        if not 0 < share <= 1:
            raise EvidenceError(f"sample is {share!r}", hint="a share above 0 and at most 1")
        self.folder = folder
        self.share = share
        self.seed = seed
        self.next_share: float | None = None  # for the next step only, if a rule requests more

    def check(self, batch: Batch) -> None:
        """Refuse a step that cannot be stored.

        Raises:
            EvidenceError: there are no token ids.
        """
        if batch.token_BT is None:
            raise EvidenceError(
                f"step {batch.weights} has no token ids, and a dump is of sequences",
                hint="pass tokens=, or leave out dump=",
            )

    def write(self, batch: Batch, rank: int, step: int, generation: int = 0) -> Path | None:
        share = max(self.share, self.next_share or 0.0)
        stream = f"keep.{rank}.{generation}" if generation else f"keep.{rank}"
        drawn_B = uniforms(self.seed, stream, batch.weights, batch.sequences)
        at = np.flatnonzero((drawn_B < share) & batch.selected_B)
        if not len(at):
            return None
        # readers of dumps cost more to import than a monitor does
        from servanda.rl.dumps.formats.parquet import Writer

        token_BT = batch.token_BT
        assert token_BT is not None  # `check` refuses a step without ids
        width = batch.mask_BT.shape[1]
        last_B = width - batch.mask_BT[:, ::-1].argmax(axis=1)  # the rest is padding
        before = token_BT.shape[1] - width
        present_BT = (np.arange(token_BT.shape[1]) < before + last_B[:, None]) & (token_BT >= 0)
        groups = batch.group_B or tuple(f"{rank}.{b}" for b in range(batch.sequences))

        def wide(values: Array | None) -> Array | None:
            return None if values is None else np.broadcast_to(values, batch.mask_BT.shape)[at]

        return Writer(self.folder, rank).step(
            step,
            token_BT[at],
            batch.mask_BT[at],
            batch.logp_train_BT[at],
            batch.logp_infer_BT[at],
            present=present_BT[at],
            groups=[groups[b] for b in at],
            labels={name: [values[b] for b in at] for name, values in batch.labels.items()},
            staleness=wide(batch.staleness_BT),
            advantages=wide(batch.advantage_BT),
            loss_weights=wide(batch.loss_weight_BT),
            loss_mask=wide(batch.loss_mask_BT),
            versions=wide(batch.version_BT),
            generation=generation,
        )


_NOTES = 20  # most notes carried over


class Monitor:
    """Judges each training step by a kernel contract, from both kernels' logprobs of its tokens.

    The claim is realised: a verdict concerns only this step's tokens.

    Args:
        contract: a Contract, the path of one, or the name of a preset of trainers, such as
            "verl-sync", "verl-async", "trl", "nemo-grpo", "prime-rl", "slime".
        gather: sends one object and returns those of all ranks, including this one, such as a
            wrapped torch.distributed.all_gather_object; None: one rank.
        dump: folder for a sample of the sequences, for `servanda check DIR`.
        sample: the sampled share, decided only by the step and the index of a sequence.
        state: JSON lines, one per step, which `servanda watch` follows and a restart continues.
        seed: seed of the sample.
        stop: whether the action `halt` is executed; otherwise it is reported as `would`.
        bitwise: whether both kernels are declared to compute the same bits; otherwise columns that
            are bitwise equal are an error.
        reference: of good runs, from `servanda contract calibrate`: the steps are also judged by
            whether the gap has changed.

    Raises:
        ContractError: no such preset or file, or an invalid contract.
        EvidenceError: not a monitor's state file.
        MeasurementError: the state file cannot be read.
    """

    def __init__(
        self,
        contract: str | Path | Contract,
        *,
        gather: Gather | None = None,
        dump: str | Path | None = None,
        sample: float = 0.01,
        state: str | Path | None = None,
        seed: int = 0,
        stop: bool = False,
        bitwise: bool = False,
        reference: str | Path | None = None,
    ) -> None:
        self._contract = RunContract.of(contract, bitwise=bitwise, reference=reference)
        self._gather = gather or ranks.alone
        self._member = ranks.name_of_member()
        self._dump = None if dump is None else SampleDump(Path(dump), sample, seed)
        self._journal = None if state is None else Journal(Path(state))
        chart = chart_of(self._contract.contract)
        self._state = RunState(chart=chart)
        if self._journal is not None:
            self._state = self._journal.read(chart)
        self._stop = stop
        self._plan: Plan | None = None
        self._first = 0
        self.notes: tuple[str, ...] = () if self._journal is None else self._journal.notes

    def across(self, gather: Gather) -> None:
        """Connect other ranks from now on, unless a `gather` was given at the start."""
        if self._gather is ranks.alone:
            self._gather = gather

    def numbered_from(self, first: int) -> None:
        """Number the steps as the trainer's own log: `first` is the step before any update."""
        self._first = first

    @property
    def contract(self) -> Contract:
        """The contract of the steps; its slices are fixed at the first step."""
        return self._plan.contract if self._plan else self._contract.contract

    @property
    def would_have_stopped(self) -> int | None:
        """The first step with the action `halt`."""
        return None if self._state.would is None else self._state.would + self._first

    def observe(
        self,
        logp_train_BT: object,
        logp_infer_BT: object,
        mask_BT: object,
        *,
        groups: Sequence[object] | None = None,
        labels: Mapping[str, Sequence[object]] | None = None,
        advantages: object = None,
        weights: int | None = None,
        staleness: object = None,
        tokens: object = None,
        selected: object = None,
        selected_from: int | None = None,
        drafts: DraftCounts | Meter | None = None,
        loss_weights: object = None,
        loss_mask: object = None,
        versions: object = None,
        older: Mapping[int, object] | None = None,
        follow: FollowStep | None = None,
    ) -> Step:
        """Judge the tokens of one step, over all ranks.

        Arrays are NumPy's, torch's or lists, [B, T]: B sequences of this rank.  A token without
        a logprob is NaN; it counts as missing and never as 0.  Tensors of an accelerator are
        reduced there.

        Args:
            logp_train_BT: the trainer's, before its update, nats.
            logp_infer_BT: the rollout engine's, of the same tokens, nats.
            mask_BT: 1 if the trainer learns from the token.
            groups: prompt of each sequence, [B]; default: each a separate group.
            labels: name -> text of each sequence, [B], such as {"env": [...]}.
            advantages: [B] or [B, T]; for two metrics, and stored in `dump` with the tokens.
            weights: number of updates of the trainer; default: one more than at the last call, also
                after a restart, and 0 at the first.  Several generations of one optimizer step are
                calls with the same number; `Step.generation` counts them.
            staleness: updates between sampling and training, [B] or [B, T]; NaN: unknown.
            tokens: ids, [B, T], or with the prompts before them; only for `dump`.
            selected: bools, [B]: whether the sequence was selected for scoring, before anything
                was known of its outcome.  The others are not judged, and their logprobs not read.
            selected_from: number of sequences from which these B were selected so.
            drafts: what this rank's engines counted of their speculative decoding since the last
                step, or a DraftMeter that reads it; the counts of all ranks are added.
            loss_weights: the weight that the loss gave to each token, [B] or [B, T].
            loss_mask: 1 if the loss used the token, after every filter, [B, T].
            versions: the weights that sampled, as a number of updates, [B] or [B, T].
            older: {1: logprobs under the weights before the last update, ...}, [B, T] each.
            follow: the result of `Follow.observe` after the sync of this step, the same on every
                rank; if an engine does not follow, the step is violated.

        Raises:
            EvidenceError: inconsistent arrays, a missing mask, or inconsistent ranks.
            ContractError: a slice needs a label that the first step lacks; or the contract
                corrects tokens, and some sequences were not selected.
        """
        weights = self._state.following if weights is None else weights
        try:
            batch = batch_of(
                logp_train_BT,
                logp_infer_BT,
                mask_BT,
                groups=groups,
                labels=labels,
                advantages=advantages,
                weights=weights,
                staleness=staleness,
                tokens=tokens,
                selected=selected,
                selected_from=selected_from,
                loss_weights=loss_weights,
                loss_mask=loss_mask,
                versions=versions,
                older=older,
            )
            check_selection(self.contract, batch)
            if self._dump is not None:
                self._dump.check(batch)
        except Exception as error:
            self.refuse(error)
            raise
        counts, notes = draft_counts(drafts)
        self._note(*notes, *filter(None, [turned(batch)]))
        if self._plan is None:
            self._open(batch)
        parts, rank = ranks.gathered(
            self._gather,
            part_of(self._member, self._digest, self.contract, self._statistics, batch, counts),
        )
        return self._judged(parts, rank, batch, follow)

    def refuse(self, error: Exception) -> None:
        """Send the other ranks the reason why this one cannot observe, so that none waits."""
        message = (self._member, self.contract.digest, -1, str(error))
        self._gather(Part(*message) if self._plan else Opening(*message))

    def _open(self, batch: Batch) -> None:
        """Fix the cells of the run: from all ranks' counts, or from the run that it continues."""
        contract, counts, sample = self._contract, Counts(), ()
        if batch.tokens:
            rows = ranks.some_rows(batch, STEP_TOKENS)
            sample = (rollouts_of(batch, self._member, rows),)
            if not self._state.contract and contract.slices_itself:
                counts.add(paired(rollouts_of(batch.on_host), 0))
            if not batch.has_prompts:
                counts.lengths.clear()  # columns of responses only do not give the context length
        own = Opening(
            self._member,
            contract.contract.digest,
            batch.weights,
            counts=counts,
            labels=labels_of(batch.labels, contract.labels),
            sample=sample,
            state=self._state,
        )
        openings, _ = ranks.gathered(self._gather, own)
        self._state = state = copy.deepcopy(openings[0].state)  # ranks may share a process
        if not state.contract:
            whole = Counts()
            for opening in openings:
                whole.join(opening.counts)
            state.window, state.rules, state.left_out = contract.slices(whole)
            labels = (labels for opening in openings for labels in opening.labels)
            state.labels = tuple(dict.fromkeys(labels))
            self._note(*state.left_out)
            known = contract.labels
            if odd := [repr(name) for name in batch.labels if name not in (*known, *FILLED)]:
                by = f"by {', '.join(known)}" if known else "by no label"
                self._note(f"label {', '.join(odd)} has no slice; slices are {by}")
        plan = plan_of(contract.complete(state.rules), state.labels)
        if state.contract not in ("", plan.contract.digest):
            raise ContractError(
                f"the state file is of contract {state.contract[:8]}, and this is "
                f"{plan.contract.digest[:8]}",
                hint="name another state file, or continue with the contract it was begun with",
            )
        self._plan, self._digest = plan, plan.contract.digest
        named = dict.fromkeys(cell.cut for cell in plan.cells if is_answered(cell))
        self._cuts: tuple[Cut, ...] = tuple(cut for cut in named if cut.name != WHOLE)
        self._statistics = StepStatistics(plan.cells, self._cuts, psi_of(plan.contract))
        self._causes = RunCauses(plan, tv_limit(plan.contract), "DUMP")
        self._causes.begin([part for opening in openings for part in opening.sample])
        self._judge = StepJudge(plan, state.window, number=state.number, digest=self._digest)

    def _overlaps(self, batch: Batch) -> Sequence[Overlaps]:
        """Slices and tokens of all ranks; gathered only if a cell is violated."""
        sample = (rollouts_of(batch, self._member, ranks.some_rows(batch, STEP_TOKENS)),)
        atoms = overlaps(self._cuts, batch)
        own = Overlaps(self._member, self._digest, batch.weights, atoms=atoms, sample=sample)
        return ranks.gathered(self._gather, own)[0]

    def _judged(
        self, parts: Sequence[Part], rank: int, batch: Batch, follow: FollowStep | None
    ) -> Step:
        plan, state = self._plan, self._state
        assert plan is not None
        groups, number = ranks.groups_of(parts), batch.weights + self._first
        # a restart repeats its step from the first generation on
        again = state.number and not state.resumed and batch.weights + 1 == state.following
        generation = state.generation + 1 if again else 0
        shared: list[Overlaps] = []

        def look() -> Sequence[str]:
            shared.extend(self._overlaps(batch))
            return sample_problems(part for rank in shared for part in rank.sample)

        found, drafts, extras, notes = judged(
            self._judge, state, parts, groups, number, generation, follow, look
        )
        verdict = found.quick
        names = [cut.name for cut in self._cuts]
        if not shared and any(c.outcome == "violated" for c in verdict.cells):
            shared.extend(self._overlaps(batch))
        taken = due_actions(plan.contract, verdict, names, ranks.added(shared))
        would = ("halt",) if "halt" in taken.action and not self._stop else ()
        if "halt" in taken.action and state.would is None:
            state.would = batch.weights
        taken = replace(taken, action=tuple(a for a in taken.action if a not in would))
        tokens = sum(part.tokens for part in parts)
        self._remember(batch, generation, groups, tokens)
        sample = [part for rank in shared for part in rank.sample]
        advice = self._causes.of(verdict.cells, number, sample, tokens)
        cause = cause_text(found, advice, batch.weights)
        masked = [cut for cut in self._cuts if cut.name in taken.masked]
        metrics = metrics_of(parts, groups, state.ends.ratio) | of_cells(verdict)
        self._note(*notes, *(state.chart.news(verdict.cells) if state.chart else ()))
        step = Step(
            batch.weights,
            verdict.outcome,
            taken.action,
            would,
            taken.pages,
            taken.masked,
            partial(token_weights, plan.contract, taken, batch, masked),
            metrics | extras | action_metrics(taken, plan.contract),
            cause,
            self.notes,
            lambda: found.verdict,
            partial(state.ends.copied().trend, least=1),
            step=number,
            generation=generation,
            drafts=drafts,
        ).joined(follow)
        if not isinstance(batch, DeviceBatch) or {"correct", "mask"} & {*taken.action}:
            _ = step.token_weights  # before the trainer changes its arrays
        self._write(step, batch, rank, groups, taken.sample)
        if tokens:
            state.contract = self._digest
        elif not state.contract:
            self._plan = None  # a step without tokens does not fix the slices
        return step

    def _remember(
        self, batch: Batch, generation: int, groups: Mapping[str, TokenSum], tokens: int
    ) -> None:
        """Add a step to the state of the run."""
        state, number = self._state, batch.weights + self._first
        state.number, state.following = self._judge.number, batch.weights + 1
        state.generation = generation
        if not tokens:
            return
        newest = state.ends.newest
        if newest is not None and batch.weights < newest.step and not state.resumed:
            self._note(
                f"step {number} came after step "
                f"{newest.step + self._first}: the records from that step on are discarded"
            )
        self._note(*self._contract.unsliced(batch.labels, state.labels))
        state.add(batch.weights, groups)

    def _write(
        self,
        step: Step,
        batch: Batch,
        rank: int,
        groups: Mapping[str, TokenSum],
        sample: float | None,
    ) -> None:
        """Write sample and state; a full disk gives a note at the next step, and stops no run."""
        try:
            if self._dump is not None:
                self._dump.write(batch.on_host, rank, step.step, step.generation)
                self._dump.next_share = sample
            if self._journal is not None and rank == 0:
                entry = state_line(step, time.time())
                if not self._state.contract and entry["tokens"]:
                    entry |= first_line(self._state)
                entry["groups"] = [[float(f"{g.total:.6g}"), g.n] for g in groups.values()]
                self._journal.write(entry)
        except (OSError, ServandaError) as error:
            self._note(f"step {step.weights} was not written: {error}")

    def _note(self, *notes: str) -> None:
        """Add a note to this step and all later ones, once each."""
        new = (note for note in notes if note not in self.notes)
        self.notes = (*self.notes, *new)[-_NOTES:]
