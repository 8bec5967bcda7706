# The page of the experiment as a text with places for what sections.py works out.

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.experiment import answers, bias, pilot, sections
from benchmarks.experiment.alarms import HEALTHY, Firings, cases_of, chosen
from benchmarks.experiment.drills import Drilled
from benchmarks.experiment.pictures import ARMS, Point, called
from benchmarks.experiment.record import Run
from benchmarks.experiment.tables import SHORT, faults_by_guards

_PAGE = """\
# What a contract is worth in a training run

This page is written by `python -m benchmarks.experiment.page` from the records in
`benchmarks/experiment/results/`, and a test fails when it is out of step with them.

## The question

A trainer updates one set of weights; an engine draws its rollouts with what it believes to be the
same ones. Say that a part of the weights never arrives. Who notices, and when? What does it cost
in reward, and does a correction of importance weights repair it? And is the bound on the bias of
the gradient, which a contract promises, true where the bias itself can be worked out?

## The protocol

{settings}

- **Task**: sums of two three-digit numbers; a prompt has {given} of the digits worked out, and
  the model has to write the rest. Reward 1 for the right sum, else 0.
- **Cases**: {cases}.
  A stale part is left out of the sync from the first step on; with "temperature off" the engine
  draws at another temperature than it says. "Adapter": a LoRA adapter is trained instead of the
  weights. "4 bits": the engine quantises the weights at every sync, which is no fault.
- **Arms**: {arms}. TIS multiplies a token's loss by min(w, 2), MIS by w inside [0.5, 2] and by
  0 outside; w is the trainer's probability over the engine's. The monitor does what the rules of
  `benchmarks/experiment/grpo.kernelcontract.yaml` say: correct and mask where the gradient clause
  is violated, halt where what is left after a correction is too much. With the drill in front, a
  run that it refuses is not started: the sync is repaired, and the repaired run is what counts.
- **Seeds**: {seeds}. A seed fixes prompts, draws and evaluation for every arm and case alike.
- **Intervals** are Student's t over seeds, 95 %. {seed_count} seeds are few, so every one
  is shown below.
- **Machine**: {versions}; one thread. {hours}

```sh
make experiment         # pilot, drills, three seeds; this page of them in runs/experiment/
make experiment-full    # pilot, drills, five seeds and every other case; this page itself
```

### The pilot

Does an uncorrupted run learn, and at which rate? Mean reward of the trained policy on its own sums
every ten steps, seed after seed, without a correction. The rate of all runs is the largest one at
which the healthy policy ends at {learnt} or better with every seed: {chosen:g}. (The rule was
written down after the first runs had begun, at that rate.)

```text
{pilot}
```

## Who notices, and when

The guards below are checks that projects document, assert or ship, with their thresholds. All of
them see the same uncorrected runs. A number is the first step on which a guard fires, as a range
over seeds; step 0 comes before the first update. Brackets mark a guard that also fires on a
healthy run.

{short}

![When each guard fires, by case](experiment_guards.svg)

{noticed}

{sharp}

{slower}

Thresholds of the field were chosen on models of 8 B parameters and more, and are read here on one
of 2.6 M. A first step of one seed is no distribution: six of the cases were run once. "0 of 180"
healthy steps are 6 runs, so the share of healthy runs with an alarm may be as high as 40 % (95 %).

What the monitor answered, over all seeds of the uncorrected runs. It is violated on evidence alone:
where a step's few tokens do not decide, it says *inconclusive*.

{monitor}

At step 0 no sync has carried anything yet, and no guard can see a fault of a sync: what the
kernels say is the healthy run's, number by number.

{start}

### The drill

It needs no step. It replaces the weights of the trainer, syncs once, scores {tokens} tokens on
both sides, and then nudges one group of weights at a time. Measured on the same model; afterwards
{restored} of {drilled} trainers had their weights back bit for bit.

{drills}

{cost}

{poisoned}

### Every guard

{guards}

{notes}

<details><summary>All of them, case by case</summary>

{all_guards}

</details>

## What it costs in reward

![Reward over updates, by case and arm](experiment_rewards.svg)

Reward on the sums of the run, by the trainer's own weights in float32, after the last update, or
where the arm halted the run. A case that was looked at once has one seed, and no interval.

{rewards}

On sums that are never trained on:

{held_out}

<details><summary>Every seed</summary>

{every_seed}

</details>

## The true bias, and its bound

At {checkpoints} updates, for {prompts} prompts, every answer that matters is enumerated, under both
kernels. So the gradient that the trainer's estimator has on average is known, and the one it is
meant to have, and their difference. The bound is A × G × D: A the largest advantage that a group of
{group} admits, G = √2 for the gradient by logits, D what the weighting leaves (docs:
[the chain](chain.md)). Answers that were not enumerated have a mass of {rest};
bias and bound are both those of the contexts that were.

![The true bias against its bound and against two metrics](experiment_truth.svg)

{bounds}

{crossed}

How much of the signal is bias, mean over seeds, in runs without a correction:

{bias}

How well a number of the step orders the checkpoints by their true bias:

{order}

## What did not help

Reward on the sums of the run, less that of the same seed without a correction:

{differences}

On sums that are never trained on:

{held_out_differences}

{helped}

{by_heart}

## Limits

- One model of 2.6 M parameters, one task, one machine without a GPU. With a learning rate of
  {rate} faults grow in a few steps; with the smaller ones of large models they take longer.
- {seed_count} seeds at most; intervals over them assume that they are draws of one normal law.
- A fault is there from the first step. One that begins later meets the monitor and the guards,
  and no drill, unless it is run again.
- The prompts are the same at every step, so that so small a model learns something in so few; it
  learns them by heart.
- The engine is Transformers in bfloat16, in one process with its trainer.
"""


def page(
    runs: Sequence[Run],
    drills: Sequence[Drilled],
    tried: Sequence[Run],
    told: Firings,
    points: Sequence[Point],
) -> str:
    """The page.

    Args:
        tried: runs of the pilot.
    """
    cases, seeds = cases_of(runs), sections.seeds_of(runs)
    first = chosen(runs, HEALTHY, "none")[0]
    return _PAGE.format(
        settings=sections.settings_table(first),
        given=("none", "one", "two", "three")[first.settings["given"]],
        cases="; ".join(map(called, cases)),
        arms=", ".join(name for arm, name in ARMS.items() if _has(runs, arm)),
        seeds=", ".join(map(str, seeds)),
        seed_count=len(seeds),
        versions=", ".join(f"{name} {value}" for name, value in first.versions.items()),
        hours=sections.hours(runs),
        learnt=pilot.LEARNT,
        chosen=pilot.chosen(tried),
        pilot="\n".join(sorted(pilot.lines(tried))),
        short=faults_by_guards(told, SHORT),
        noticed=sections.noticed(told),
        sharp=sections.sharp(told),
        slower=answers.slower(runs, told),
        monitor=answers.monitor_table(runs),
        start=sections.equal_at_start(runs),
        tokens=drills[0].tokens,
        restored=sum(drill.restored for drill in drills),
        drilled=len(drills),
        drills=sections.drill_table(drills),
        cost=sections.drill_cost(runs),
        poisoned=sections.poisoned(drills),
        guards=sections.guard_list([*told]),
        notes=sections.guard_notes(runs),
        all_guards=faults_by_guards(told, [*told]),
        rewards=sections.reward_table(runs, "trained"),
        held_out=sections.reward_table(runs, "held_out"),
        every_seed=sections.seed_table(runs),
        checkpoints=", ".join(map(str, first.settings["checkpoints"])),
        prompts=first.settings["checkpoint_prompts"],
        group=first.settings["answers"],
        rest=bias.unseen(runs),
        bounds=bias.bound_table(points),
        crossed=bias.crossed(runs, points),
        bias=bias.bias_table(runs),
        order=bias.order_table(points),
        differences=sections.differences(runs, "trained"),
        helped=sections.helped(runs),
        by_heart=sections.by_heart(runs),
        held_out_differences=sections.differences(runs, "held_out"),
        rate=first.settings["learning_rate"],
    )


def _has(runs: Sequence[Run], arm: str) -> bool:
    return any(run.settings["arm"] == arm for run in runs)
