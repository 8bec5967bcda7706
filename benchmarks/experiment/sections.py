# The words and tables of docs/explanation/experiment.md; every number in them is worked out here.

from __future__ import annotations

import math
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


def seeds_of(runs: Sequence[Run]) -> list[int]:
    return sorted({run.settings["seed"] for run in runs})


def final(runs: Sequence[Run], case: str, arm: str, what: str) -> dict[int, float]:
    """Seed -> reward at the last evaluation."""
    found = [run for run in chosen(runs, case, arm) if run.evaluations]
    return {run.settings["seed"]: run.evaluations[what][-1] for run in found}


def _told(values: Sequence[float], *, signed: bool = False) -> str:
    return Spread(tuple(values)).told(signed=signed) if values else "not run"


def reward_table(runs: Sequence[Run], what: str) -> str:
    """Reward after the last update: a row a case, a column an arm."""
    rows = []
    for case in cases_of(runs):
        found = [final(runs, case, arm, what) for arm in ARMS]
        told = (_told([*of.values()]) for of in found)
        rows.append(
            (called(case), *(t + copied(runs, case, a) for t, a in zip(told, ARMS, strict=True)))
        )
    return markdown(("", *ARMS.values()), rows)


def copied(runs: Sequence[Run], case: str, arm: str) -> str:
    """The mark of an arm of which runs are read from another's record."""
    found = chosen(runs, case, arm)
    same = sum(bool(run.same_as) for run in found)
    return "" if not same else " =" if same == len(found) else f" ({same} of {len(found)} =)"


def seed_table(runs: Sequence[Run]) -> str:
    """Every seed: rewards after the last update, and what the arm did on the way."""
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
        "own sums",
        "other sums",
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
    """What a faulty run shares with the healthy one that it is compared with."""
    return run.settings["engine"], run.settings["seed"]


def drill_table(drills: Sequence[Drilled]) -> str:
    rows = [
        (
            called(drill.fault),
            drill.outcome,
            drill.sentence,
            f"{drill.found:.3f}",
            f"{drill.poison:.2f} of {drill.limit:.2f}",
            f"{drill.syncs}",
        )
        for drill in drills
    ]
    head = ("sync", "outcome", "says", "mean |d| before", "after poison, of limit", "syncs")
    return markdown(head, rows)


def poisoned(drills: Sequence[Drilled]) -> str:
    """What a threshold of the field would say of the tokens that the drill scored."""
    broken = [drill for drill in drills if drill.fault != HEALTHY]
    limit = FIELD["slime"].bars[0].at_most
    before, after = (
        sum(of > limit for of in values)
        for values in ([drill.found for drill in broken], [drill.poison for drill in broken])
    )
    healthy = next(drill.poison for drill in drills if drill.fault == HEALTHY)
    return (
        f"slime's threshold, mean |d| > {limit:g}, evaluated on the tokens that the drill scores, "
        f"fires on {before} of {len(broken)} broken syncs before the weights are replaced, and on "
        f"{after} afterwards; a healthy sync then has mean |d| {healthy:.2f}. So the drill finds "
        "these faults because it replaces weights, not because its threshold is finer."
    )


def drill_cost(runs: Sequence[Run]) -> str:
    """What the drills of the runs cost, in the time of their steps."""
    drills = [run.preflight for run in runs if run.preflight]
    if not drills:
        return ""
    step = median(s for run in runs if not run.same_as for s in run.steps["seconds"])
    took = median(drill["seconds"] for drill in drills)
    syncs = sorted({drill["syncs"] for drill in drills})
    return (
        f"The {len(drills)} drills of the runs below took {took:.0f} s in the median, and "
        f"{' or '.join(map(str, syncs))} syncs: as long as {took / step:.0f} steps of {step:.1f} s "
        "each, on a machine that did other work beside."
    )


def guard_list(names: Sequence[str]) -> str:
    """Guards with their sources."""
    rows = [(GUARDS[name].who, GUARDS[name].rule, GUARDS[name].source) for name in names]
    return markdown(("guard", "fires when", "is"), rows)


def guard_notes(runs: Sequence[Run]) -> str:
    """What is watched and gates on nothing, and where a record stands in for a definition."""
    run = chosen(runs, HEALTHY, "none")[0]
    shares = [max(r.steps["seq_masked_share"]) for r in runs if r.settings["arm"] == "none"]
    notes = [
        "TRL gates on nothing: it masks sequences whose product of weights is above 3, and logs no "
        f"share of them. The largest share of a step in these runs is {100 * max(shares):.0f} %."
    ]
    if "max_seq_mult_prob_error" not in run.steps:
        notes.append(
            "NeMo-RL's threshold for a sequence (2.0, it masks) has no row: the records do not "
            "hold its statistic."
        )
    if "is_std" not in run.steps:
        notes.append(
            "verl's standard deviation of the weights is worked out from their mean and ESS, which "
            "are kept with four digits: it is off by up to .005."
        )
    if "abs_d_mean_by_sequence" not in run.steps:
        notes.append(
            "slime and miles take the mean of each sequence first; the records keep the mean over "
            "tokens, which is read here in its place."
        )
    return " ".join(notes)


def settings_table(run: Run) -> str:
    """What every run is set to."""
    names = {
        "steps": "updates",
        "prompts": "prompts a step, the same ones at each",
        "answers": "answers to each prompt, a group",
        "width": "most tokens of an answer",
        "temperature": "temperature",
        "learning_rate": "learning rate of AdamW",
        "evaluated": "answers of an evaluation",
    }
    rows = [("model", "models/tiny-lm, 2.6 M parameters, trained whole, in float32")]
    rows.append(("engine", "transformers, bfloat16, sdpa attention; decodes with a cache"))
    rows.append(("loss", "GRPO, advantages normalised by group, constant divisor, one update"))
    rows += [(told, f"{run.settings[name]}") for name, told in names.items()]
    return markdown(("", ""), rows)


def hours(runs: Sequence[Run]) -> str:
    """What all runs took, and how many records are no runs of their own."""
    own = [run for run in runs if not run.same_as]
    took = math.fsum(run.seconds or 0.0 for run in runs) / 3600
    return (
        f"{len(own)} runs took {took:.1f} hours; {len(runs) - len(own)} more records are read from "
        f"them: an arm in which nothing was due, or that starts from a repaired sync, repeats "
        "another run to the last bit and was not run again. Below, `=` marks such an arm."
    )


def noticed(told: Firings) -> str:
    """What the table says, case by case, in one sentence each."""
    lines = []
    for case in next(iter(told.values())):
        if case == HEALTHY:
            continue
        quiet = [name for name in FIELD if name in told and not cries(told[name])]
        field = {name: told[name][case] for name in quiet if told[name][case]}
        fired = [n for n, firing in field.items() if firing and firing.runs == len(firing.first)]
        lines.append(
            f"- **{called(case)}**: {len(fired)} of {len(field)} thresholds fire on every seed; "
            f"the monitor {_when(told, 'monitor', case)}, the drill {_when(told, 'drill', case)}."
        )
    head = "Thresholds that other projects publish, without those that also fire on healthy runs:"
    return "\n".join([head, "", *lines])


def sharp(told: Firings) -> str:
    """The guards of the field that miss no broken case and cry on no healthy run."""
    broken = [case for case in next(iter(told.values())) if not case.startswith(HEALTHY)]
    found = [
        f"{FIELD[name].who} ({FIELD[name].rule})"
        for name in FIELD
        if name in told and not cries(told[name])
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


def cries(row: Mapping[str, Firing | None]) -> bool:
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
    """Reward of an arm less that of the arm without a correction, over the seeds of both."""
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
    return markdown(("", *(ARMS[arm] for arm in arms)), rows)


def helped(runs: Sequence[Run]) -> str:
    """Which differences on the run's own sums these seeds can tell from none."""
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
                found.append(f"{ARMS[arm]} where {called(case)}")
    return (
        f"Better than no correction, with the whole interval: {'; '.join(above) or 'none'}. "
        f"Worse: {'; '.join(below) or 'none'}. The other {open_} intervals hold 0: with so few "
        "seeds nothing is shown there, neither a gain nor a loss. "
        f"{same} cells are 0 by construction: nothing was due in that arm, so that it is the run "
        "without a correction."
    )


def by_heart(runs: Sequence[Run]) -> str:
    """What the healthy, uncorrected runs do to both rewards."""
    found = chosen(runs, HEALTHY, "none")
    ends = {
        what: [_mean([run.evaluations[what][i] for run in found]) for i in (0, -1)]
        for what in ("trained", "held_out")
    }
    own, other = ends["trained"], ends["held_out"]
    return (
        f"On healthy runs the reward on the run's own sums goes from {own[0]:.2f} to {own[1]:.2f}, "
        f"and that on other sums from {other[0]:.2f} to {other[1]:.2f}: what is learnt is the few "
        "prompts, by heart."
    )
