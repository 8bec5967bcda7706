# The sentences and tables of docs/explanation/experiment.md, with every number computed here.

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from statistics import median

from benchmarks.experiment.alarms import (
    BEFORE,
    GUARDS,
    HEALTHY,
    Firing,
    Firings,
    cases_of,
    chosen,
    compared,
    steps_of,
)
from benchmarks.experiment.drills import Drilled
from benchmarks.experiment.guards import FIELD
from benchmarks.experiment.pictures import ARMS, called
from benchmarks.experiment.record import Run
from benchmarks.experiment.seeds import Spread
from benchmarks.experiment.statistics import STATISTICS
from benchmarks.experiment.tables import markdown
from servanda.rl.sync_drill.diagnosis import CAUSES


def seeds_of(runs: Sequence[Run]) -> list[int]:
    return sorted({run.settings["seed"] for run in runs})


def final(runs: Sequence[Run], case: str, arm: str, what: str) -> dict[int, float]:
    """Seed -> reward at the last evaluation."""
    found = [run for run in chosen(runs, case, arm) if run.evaluations]
    return {run.settings["seed"]: run.evaluations[what][-1] for run in found}


def _told(values: Sequence[float], *, signed: bool = False) -> str:
    return Spread(tuple(values)).told(signed=signed) if values else "not run"


def reward_table(runs: Sequence[Run], what: str) -> str:
    """Reward after the last update: a row for each case, a column for each arm."""
    rows = []
    for case in cases_of(runs):
        found = [final(runs, case, arm, what) for arm in ARMS]
        told = (_told([*of.values()]) for of in found)
        rows.append(
            (called(case), *(t + copied(runs, case, a) for t, a in zip(told, ARMS, strict=True)))
        )
    return markdown(("case", *ARMS.values()), rows)


def copied(runs: Sequence[Run], case: str, arm: str) -> str:
    """The mark of an arm whose runs are read from the record of another."""
    found = chosen(runs, case, arm)
    same = sum(bool(run.same_as) for run in found)
    return "" if not same else " =" if same == len(found) else f" ({same} of {len(found)} =)"


def seed_table(runs: Sequence[Run]) -> str:
    """Every seed: rewards after the last update, halts, and tokens with weight 0."""
    rows = []
    for case in cases_of(runs):
        for arm, name in ARMS.items():
            found = [run for run in chosen(runs, case, arm) if run.evaluations]
            if not found:
                continue
            rewards = (final(runs, case, arm, what).values() for what in ("trained", "held_out"))
            halts = ["-" if run.halted_at is None else str(run.halted_at) for run in found]
            dropped = [_mean(run.steps["weight_zero"]) for run in found]
            rows.append(
                (
                    called(case),
                    name + copied(runs, case, arm),
                    " ".join(map(str, seeds_of(found))),
                    *(" ".join(f"{value:.2f}" for value in values) for values in rewards),
                    " ".join(halts),
                    " ".join(f"{100 * share:.1f}" for share in dropped),
                )
            )
    head = (
        "case",
        "arm",
        "seeds",
        "training problems",
        "held-out problems",
        "halted at",
        "tokens with weight 0, %",
    )
    return markdown(head, rows)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def equal_at_start(runs: Sequence[Run]) -> str:
    """How the statistics of step 0 compare with those of the healthy run of the same seed."""
    plain = [run for run in runs if run.settings["arm"] == "none"]
    healthy = {_pair(run): steps_of(run)[0] for run in plain if run.settings["fault"] == HEALTHY}
    rows = []
    for case in cases_of(plain):
        found = [run for run in chosen(plain, case, "none") if run.settings["fault"] != HEALTHY]
        pairs = [(steps_of(run)[0], healthy[_pair(run)]) for run in found if _pair(run) in healthy]
        if pairs:
            same = min(
                sum(own[name] == other[name] for name in STATISTICS if name in own)
                for own, other in pairs
            )
            size = sum(name in pairs[0][0] for name in STATISTICS)
            mean = pairs[0][0]["abs_d_mean"]
            rows.append((called(case), f"{same} of {size}", f"{mean:.5f}"))
    return markdown(("case", "statistics equal to the healthy run's", "mean |d|, first seed"), rows)


def _pair(run: Run) -> tuple[object, object]:
    """The settings that a faulty run has in common with its healthy run."""
    return run.settings["engine"], run.settings["seed"]


def drill_table(drills: Sequence[Drilled]) -> str:
    rows = [
        (
            called(drill.fault),
            drill.outcome,
            diagnosis(drill),
            f"{drill.found:.3f}",
            f"{drill.poison:.2f} ({drill.limit:.2f})",
            f"{drill.syncs}",
        )
        for drill in drills
    ]
    head = (
        "sync",
        "outcome",
        "diagnosis",
        "mean |d| before",
        "mean |d| with random weights (limit)",
        "syncs",
    )
    return markdown(head, rows)


def diagnosis(drill: Drilled) -> str:
    """The diagnosis on record, in the words that the preflight sync test prints today."""
    if not drill.cause:
        (groups,) = re.findall(r"all (\d+) groups", drill.sentence)
        return f"all {groups} groups of weights are synced"
    details = re.search(r": .*" if drill.cause == "scaled" else r" \(.*", drill.sentence)
    return CAUSES[drill.cause] + (details[0] if details else "")


def randomised(drills: Sequence[Drilled]) -> str:
    """The outcome of another project's threshold on the tokens that the tests scored."""
    broken = [drill for drill in drills if drill.fault != HEALTHY]
    limit = FIELD["slime"].bars[0].at_most
    before, after = (
        sum(of > limit for of in values)
        for values in ([drill.found for drill in broken], [drill.poison for drill in broken])
    )
    healthy = next(drill.poison for drill in drills if drill.fault == HEALTHY)
    return (
        f"On the tokens of the test, slime's threshold, mean |d| > {limit:g}, fires for {before} "
        f"of {len(broken)} broken syncs before the weights are randomised, and for {after} "
        f"afterwards; a healthy sync then has mean |d| {healthy:.2f}. So the test finds these "
        "faults because it changes the weights, not because its threshold is stricter."
    )


def drill_cost(runs: Sequence[Run]) -> str:
    """The cost of the preflight tests, in the time of training steps."""
    drills = [run.preflight for run in runs if run.preflight]
    if not drills:
        return ""
    step = median(s for run in runs if not run.same_as for s in run.steps["seconds"])
    took = median(drill["seconds"] for drill in drills)
    syncs = sorted({drill["syncs"] for drill in drills})
    return (
        f"The {len(drills)} tests before the runs below took {took:.0f} s (median) and "
        f"{' or '.join(map(str, syncs))} syncs each: as long as {took / step:.0f} training steps "
        f"of {step:.1f} s, on a machine that was busy with other work."
    )


def guard_list(names: Sequence[str]) -> str:
    """Checks with their sources."""
    rows = [(GUARDS[name].who, GUARDS[name].rule, GUARDS[name].source) for name in names]
    return markdown(("check", "fires when", "source"), rows)


def guard_notes(runs: Sequence[Run]) -> str:
    """Metrics without a threshold, and statistics that stand in for a definition."""
    run = chosen(runs, HEALTHY, "none")[0]
    shares = [max(r.steps["seq_masked_share"]) for r in runs if r.settings["arm"] == "none"]
    notes = [
        "TRL has no threshold that raises an alarm: it masks sequences whose product of weights is "
        "above 3, and does not log their share. The largest share in a step of these runs is "
        f"{100 * max(shares):.0f} %."
    ]
    if "max_seq_mult_prob_error" not in run.steps:
        notes.append(
            "NeMo-RL's threshold for a sequence (2.0, the sequence is masked) has no row, because "
            "the records do not contain its statistic."
        )
    if "is_std" not in run.steps:
        notes.append(
            "verl's standard deviation of the weights is computed from their mean and ESS, which "
            "the records keep with four digits: the error is at most 0.005."
        )
    if "abs_d_mean_by_sequence" not in run.steps:
        notes.append(
            "slime and miles take the mean of each sequence first; the records contain the mean "
            "over tokens, which is used in its place."
        )
    return " ".join(notes)


def settings_table(run: Run) -> str:
    """The settings that all runs share."""
    names = {
        "steps": "updates",
        "prompts": "prompts per step (the same at every step)",
        "answers": "responses per prompt (one group)",
        "width": "maximum tokens per response",
        "temperature": "temperature",
        "learning_rate": "AdamW learning rate",
        "evaluated": "responses per evaluation",
    }
    rows = [("model", "models/tiny-lm, 2.6 M parameters, all of them trained, in float32")]
    rows.append(("engine", "transformers, bfloat16, sdpa attention, decoding with a KV cache"))
    rows.append(
        ("loss", "GRPO, advantages normalised by group, constant divisor, one update per batch")
    )
    rows += [(shown, f"{run.settings[name]}") for name, shown in names.items()]
    return markdown(("setting", "value"), rows)


def hours(runs: Sequence[Run]) -> str:
    """The time of all runs, and how many records are no runs of their own."""
    own = [run for run in runs if not run.same_as]
    took = math.fsum(run.seconds or 0.0 for run in runs) / 3600
    return (
        f"{len(own)} runs took {took:.1f} hours; {len(runs) - len(own)} more records are read from "
        "them. An arm that had no reason to act, or that starts from a repaired sync, repeats "
        "another run to the last bit and was not run again. Below, `=` marks such an arm."
    )


def noticed(told: Firings) -> str:
    """The content of the table, one sentence for each case."""
    lines = []
    for case in next(iter(told.values())):
        if case == HEALTHY:
            continue
        quiet = [name for name in FIELD if name in told and not fires_on_healthy(told[name])]
        field = {name: told[name][case] for name in quiet if told[name][case]}
        fired = [n for n, firing in field.items() if firing and firing.runs == len(firing.first)]
        lines.append(
            f"- **{called(case)}**: {len(fired)} of {len(field)} thresholds fire on every seed; "
            f"the monitor {_when(told, 'monitor', case)}, the preflight test "
            f"{_when(told, 'drill', case)}."
        )
    head = "Thresholds of other projects, without those that also fire on healthy runs:"
    return "\n".join([head, "", *lines])


def sharp(told: Firings) -> str:
    """The checks of other projects that fire on every broken case and on no healthy run."""
    broken = [case for case in next(iter(told.values())) if not case.startswith(HEALTHY)]
    found = [
        f"{FIELD[name].who} ({FIELD[name].rule})"
        for name in FIELD
        if name in told and not fires_on_healthy(told[name])
        if all((of := told[name][case]) is None or of.runs == len(of.first) for case in broken)
    ]
    if not found:
        return (
            "No published threshold fires on every broken run without also firing on a healthy one."
        )
    return (
        f"{len(found)} published thresholds fire on every broken run and on no healthy one: "
        f"{'; '.join(found)}."
    )


def fires_on_healthy(row: Mapping[str, Firing | None]) -> bool:
    healthy = row[HEALTHY]
    return bool(healthy and healthy.fired)


def _when(told: Firings, guard: str, case: str) -> str:
    firing = told[guard][case] if guard in told else None
    if firing is None:
        return "was not run"
    if not firing.runs:
        return "never fires"
    if set(firing.first) == {BEFORE}:
        return "fires before the first step"
    return f"fires at step {firing}"


def differences(runs: Sequence[Run], what: str) -> str:
    """Reward of an arm minus that of the arm without a correction, over the seeds of both."""
    rows = []
    arms = [arm for arm in ARMS if arm != "none"]
    for case in compared(runs):
        none = final(runs, case, "none", what)
        found = [final(runs, case, arm, what) for arm in arms]
        less = [[of[seed] - none[seed] for seed in of if seed in none] for of in found]
        told = (_told(values, signed=True) for values in less)
        rows.append(
            (called(case), *(t + copied(runs, case, a) for t, a in zip(told, arms, strict=True)))
        )
    return markdown(("case", *(ARMS[arm] for arm in arms)), rows)


def helped(runs: Sequence[Run]) -> str:
    """The differences on the training problems whose intervals exclude 0."""
    above, below, open_, same = [], [], 0, 0
    for case in compared(runs):
        none = final(runs, case, "none", "trained")
        for arm in ARMS:
            twins = chosen(runs, case, arm) if arm != "none" else []
            if twins and all("-none-" in run.same_as for run in twins):
                same += 1
                continue
            of = final(runs, case, arm, "trained")
            less = [of[seed] - none[seed] for seed in of if seed in none]
            ends = Spread(tuple(less)).interval if arm != "none" and less else None
            if ends is None:
                continue
            low, high = ends
            found = above if low > 0 else below if high < 0 else None
            if found is None:
                open_ += 1
            else:
                found.append(f"{ARMS[arm]} ({called(case)})")
    return (
        "On the training problems the whole interval is above 0 for: "
        f"{'; '.join(above) or 'none'}. It is below 0 for: {'; '.join(below) or 'none'}. The other "
        f"{open_} intervals contain 0: with so few seeds they show neither a gain nor a loss. "
        f"{same} cells are 0 by construction: the arm had no reason to act, so it is the run "
        "without a correction."
    )


def by_heart(runs: Sequence[Run]) -> str:
    """How both rewards change on healthy, uncorrected runs."""
    found = chosen(runs, HEALTHY, "none")
    ends = {
        what: [_mean([run.evaluations[what][i] for run in found]) for i in (0, -1)]
        for what in ("trained", "held_out")
    }
    own, other = ends["trained"], ends["held_out"]
    return (
        f"On healthy runs the reward on the training problems goes from {own[0]:.2f} to "
        f"{own[1]:.2f}, and the reward on held-out problems from {other[0]:.2f} to {other[1]:.2f}: "
        "the model memorises the few prompts."
    )
