# The monitor: every training step's own tokens, judged as `servanda check` would judge them.

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from servanda.contract.identity import EvidenceKey
from servanda.contract.model import WHOLE, Contract
from servanda.errors import ContractError, ServandaError
from servanda.judgement.bitwise import objection, remarks
from servanda.judgement.clauses.gradient import psi_of
from servanda.judgement.evidence import Evidence
from servanda.judgement.plan import Plan
from servanda.judgement.slices.rules import Cut
from servanda.judgement.verdict import BlindSpot, Verdict, judge, unsound
from servanda.rl.dumps import diagnosis
from servanda.rl.dumps.blocks import paired
from servanda.rl.dumps.slicing import Counts
from servanda.rl.dumps.steps import GroupSums
from servanda.rl.monitor import actions, ranks, soundness
from servanda.rl.monitor.batch import Batch
from servanda.rl.monitor.contract import WORKLOAD, Terms, labels_of, plan_of
from servanda.rl.monitor.ranks import Gather, Opening, Overlaps, Part
from servanda.rl.monitor.sample_dump import Keeper
from servanda.rl.monitor.slice_atoms import COLUMNS
from servanda.rl.monitor.state_file import Journal, Memory, kept
from servanda.rl.monitor.statistics import Scales, as_round, contributions, joined, overlaps, told
from servanda.rl.monitor.step import Step, line, measured
from servanda.theory.stats.agreement import Agreement

_NOTES = 20  # that are carried on


class Monitor:
    """Judges each training step by a kernel contract, from both kernels' logprobs of its tokens.

    The claim is realised: a verdict speaks of this step's tokens and of no others.

    Args:
        contract: a Contract, the path of one, or the name of a preset of trainers, such as
            "verl-sync", "verl-async", "trl", "nemo-grpo", "prime-rl", "slime".
        gather: sends one object and returns those of all ranks, this one included, such as
            torch.distributed.all_gather_object wrapped; None: there is one rank.
        dump: folder to keep a share of the sequences in, for `servanda check DIR`.
        sample: that share, decided from the step and the index of a sequence alone.
        state: JSON lines, one a step, which `servanda watch` follows and a restart continues.
        seed: of the share.
        stop: whether a rule that says halt is an action; else it is told as `would`.
        bitwise: whether both kernels are declared to compute the same bits; without it, columns
            that are equal in every bit are an error.

    Raises:
        ContractError: there is no such preset or file, or its text is wrong.
        EvidenceError: the state file is of no monitor; MeasurementError: it cannot be read.
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
    ) -> None:
        self._terms = Terms.of(contract, bitwise=bitwise)
        self._gather = gather or ranks.alone
        self._member = ranks.name_of_member()
        self._keeper = None if dump is None else Keeper(Path(dump), sample, seed)
        self._journal = None if state is None else Journal(Path(state))
        self._memory = Memory() if self._journal is None else self._journal.read()
        self._stop = stop
        self._plan: Plan | None = None
        self.notes: tuple[str, ...] = () if self._journal is None else self._journal.notes

    def across(self, gather: Gather) -> None:
        """Observe with other ranks from now on, unless a `gather` was given at the start."""
        if self._gather is ranks.alone:
            self._gather = gather

    @property
    def contract(self) -> Contract:
        """What steps are held to; its slices are decided at the first step."""
        return self._plan.contract if self._plan else self._terms.contract

    @property
    def would_have_stopped(self) -> int | None:
        """The first step at which a rule said halt."""
        return self._memory.would

    def observe(
        self,
        logp_train_BT: object,
        logp_infer_BT: object,
        mask_BT: object,
        *,
        groups: Sequence[object] | None = None,
        labels: Mapping[str, Sequence[object]] | None = None,
        advantages: object = None,
        weights: int,
        staleness: object = None,
        tokens: object = None,
    ) -> Step:
        """Judge the tokens of one step; of all ranks, where there are several.

        Arrays are NumPy's, torch's or lists, [B, T]: B sequences of this rank.  A token without
        a logprob is NaN; it counts as missing and never as 0.

        Args:
            logp_train_BT: the trainer's, before its update, nats.
            logp_infer_BT: the rollout engine's, of the same tokens, nats.
            mask_BT: 1 where the trainer learns from the token.
            groups: prompt of each sequence, [B]; default each its own.
            labels: name -> text of each sequence, [B], such as {"env": [...]}.
            advantages: [B] or [B, T]; for two metrics, and kept in `dump` beside the tokens.
            weights: how many updates the trainer has made.
            staleness: updates between drawing and training, [B] or [B, T]; NaN: not known.
            tokens: ids, [B, T], or with the prompts before them; for `dump` alone.

        Raises:
            EvidenceError: arrays do not fit together, there is no mask, or ranks disagree.
            ContractError: a slice asks for a label that the first step does not have.
        """
        try:
            batch = Batch.of(
                logp_train_BT,
                logp_infer_BT,
                mask_BT,
                groups=groups,
                labels=labels,
                advantages=advantages,
                weights=weights,
                staleness=staleness,
                tokens=tokens,
            )
            if self._keeper is not None:
                self._keeper.needed(batch)
        except Exception as error:
            self.refuse(error)
            raise
        if self._plan is None:
            self._open(batch)
        assert self._plan is not None
        said = (self._member, self._plan.contract.digest, batch.weights)
        parts, rank = ranks.gathered(self._gather, self._part(said, batch))
        return self._judged(parts, rank, batch)

    def refuse(self, error: Exception) -> None:
        """Tell the other ranks why this one cannot observe a step; they would wait for it."""
        said = (self._member, self.contract.digest, -1, str(error))
        self._gather(Part(*said) if self._plan else Opening(*said))

    def _open(self, batch: Batch) -> None:
        """Fix the cells of the run: by all ranks' counts, or as the one it continues had them."""
        said = (self._member, self._terms.contract.digest, batch.weights)
        counts = Counts()
        if batch.tokens and not self._memory.contract and self._terms.slices_itself:
            counts.add(paired(soundness.rollouts_of(batch), 0))
            if not batch.has_prompts:
                counts.lengths.clear()  # columns of answers alone do not tell a context's length
        mine = Opening(
            *said,
            counts=counts,
            kinds=labels_of(batch.labels, self._terms.labels),
            memory=self._memory,
        )
        openings, _ = ranks.gathered(self._gather, mine)
        self._memory = copy.deepcopy(openings[0].memory)  # ranks may share a process
        if not self._memory.contract:
            whole = Counts()
            for opening in openings:
                whole.join(opening.counts)
            self._memory.rules, notes = self._terms.rules(whole)
            kinds = (kind for opening in openings for kind in opening.kinds)
            self._memory.kinds = tuple(dict.fromkeys(kinds))
            self._note(*notes)
            self._memory.left_out = notes
            asked = self._terms.labels
            if odd := [repr(name) for name in batch.labels if name not in asked]:
                by = f"by {', '.join(asked)}" if asked else "by no label"
                self._note(f"no slice is by label {', '.join(odd)}: they are {by}")
        plan = plan_of(self._terms.complete(self._memory.rules), self._memory.kinds)
        if self._memory.contract not in ("", plan.contract.digest):
            raise ContractError(
                f"the state file is of contract {self._memory.contract[:8]}, and this is "
                f"{plan.contract.digest[:8]}",
                hint="name another state file, or go on under the contract that it was begun with",
            )
        self._plan = plan
        named = dict.fromkeys(cell.cut for cell in plan.cells if told(cell))
        self._cuts: tuple[Cut, ...] = tuple(cut for cut in named if cut.name != WHOLE)
        # a step does not judge what is known after the token, and shows where the excess lies
        late = dict.fromkeys(cell.cut for cell in plan.cells if cell.cut.outcome)
        shown = (cut for cut in late if cut.fields <= {*COLUMNS})
        self._shown: tuple[Cut, ...] = (*self._cuts, *shown)
        self._scales = Scales(plan.cells, self._cuts)

    def _part(self, said: tuple[str, str, int], batch: Batch) -> Part:
        assert self._plan is not None
        found = self._scales.weigh(batch)
        names = batch.group_B or tuple(f"{b}@{self._member}" for b in range(batch.sequences))
        sums: dict[str, GroupSums] = {}
        for name, drift, n in zip(
            names, found.drift_B.tolist(), found.known_B.tolist(), strict=True
        ):
            sums[name] = sums.get(name, GroupSums()) + GroupSums(drift, n)
        return Part(
            *said,
            statistics=found.statistics,
            groups=tuple(sums.items()),
            sequences=batch.sequences,
            tokens=batch.tokens,
            usable=found.usable,
            staleness=batch.staleness,
            contributions=contributions(batch, psi_of(self._plan.contract)),
            unsound=soundness.problems(batch),
            agreement=soundness.agreement_of(batch),
        )

    def _overlaps(self, verdict: Verdict, batch: Batch) -> dict[int, tuple[int, float]]:
        """Which slices tokens share; asked of all ranks where a cell is red, and only there."""
        if not any(c.outcome == "violated" for c in verdict.cells):
            return {}
        said = (self._member, verdict.key.contract, batch.weights)
        mine = Overlaps(*said, atoms=overlaps(self._shown, batch))
        return ranks.added(ranks.gathered(self._gather, mine)[0])

    def _judged(self, parts: Sequence[Part], rank: int, batch: Batch) -> Step:
        plan, memory = self._plan, self._memory
        assert plan is not None
        groups = ranks.groups_of(parts)
        agreement = sum((part.agreement for part in parts), Agreement())
        weighed_round = as_round(
            plan,
            joined(plan.cells, [part.statistics for part in parts]),
            sequences=sum(part.sequences for part in parts),
            tokens=sum(part.tokens for part in parts),
            groups=len(groups),
            agreement=agreement,
        )
        key = EvidenceKey(
            contract=plan.contract.digest,
            corpus="",
            train="external",
            infer="external",
            weights=str(batch.weights),
            grade="declared",
        )
        evidence = Evidence(key, plan.digest, {(WORKLOAD, 0): weighed_round})
        wrong = [problem for part in parts for problem in part.unsound]
        if copied := objection(plan.contract, agreement):
            wrong.append(copied)
        else:
            self._note(*remarks(plan.contract, agreement))
        if not weighed_round.tokens:
            wrong.append("no token of the mask is trained")

        def answer(intervals: bool = True) -> Verdict:
            verdict = judge(plan, evidence, intervals=intervals)
            spots = tuple(BlindSpot("slice", text) for text in memory.left_out) if intervals else ()
            verdict = replace(verdict, blind_spots=(*verdict.blind_spots, *spots))
            return unsound(verdict, wrong[0]) if wrong else verdict

        verdict = answer(intervals=False)
        names = [cut.name for cut in self._shown]
        sums = self._overlaps(verdict, batch)
        taken = actions.due(plan.contract, verdict, names, sums)
        would = ("halt",) if "halt" in taken.action and not self._stop else ()
        if "halt" in taken.action and memory.would is None:
            memory.would = batch.weights
        taken = replace(taken, action=tuple(a for a in taken.action if a not in would))
        if weighed_round.tokens:
            if memory.newest is not None and batch.weights < memory.newest and not memory.resumed:
                self._note(
                    f"step {batch.weights} came after step {memory.newest}: what was known of the "
                    "steps from it on is forgotten"
                )
            self._note(*self._terms.unsliced(batch.labels, memory.kinds))
            memory.add(batch.weights, groups)
        trend_of = memory.copied()
        red = dict.fromkeys(
            c.slice for c in verdict.cells if c.enforced and c.outcome == "violated"
        )
        if verdict.outcome == "error":
            failed = (c for c in verdict.cells if c.enforced and c.outcome == "error")
            cause = wrong[0] if wrong else next((c.note for c in failed), "")
        else:
            cause = diagnosis.likely(self._shown, [*red], sums, None)
        masked = [cut for cut in self._cuts if cut.name in taken.masked]
        step = Step(
            batch.weights,
            verdict.outcome,
            taken.action,
            would,
            taken.pages,
            taken.masked,
            actions.token_weights(plan.contract, taken, batch, masked),
            measured(verdict, parts, groups, memory.ratio) | actions.metrics(taken, plan.contract),
            cause,
            self.notes,
            answer,
            lambda: trend_of.drift,
        )
        self._written(step, batch, rank, groups, taken.sample)
        if weighed_round.tokens:
            memory.contract = plan.contract.digest
        elif not memory.contract:
            self._plan = None  # a step without a token decides no slices
        return step

    def _written(
        self,
        step: Step,
        batch: Batch,
        rank: int,
        groups: Mapping[str, GroupSums],
        sample: float | None,
    ) -> None:
        """Keep what is to be kept; a full disk is a note at the next step, and stops no run."""
        try:
            if self._keeper is not None:
                self._keeper.keep(batch, rank)
                self._keeper.next_share = sample
            if self._journal is not None and rank == 0:
                entry = line(step, time.time())
                if not self._memory.contract and entry["tokens"]:
                    entry |= kept(self._memory)
                entry["groups"] = [[float(f"{g.total:.6g}"), g.n] for g in groups.values()]
                self._journal.write(entry)
        except (OSError, ServandaError) as error:
            self._note(f"step {step.weights} was not written: {error}")

    def _note(self, *notes: str) -> None:
        """Say it with this step and all later ones, once each."""
        new = (note for note in notes if note not in self.notes)
        self.notes = (*self.notes, *new)[-_NOTES:]
