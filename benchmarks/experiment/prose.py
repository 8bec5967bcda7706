# The page of the experiment as a text with places for the tables and numbers of sections.py.

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.experiment import answers, bias, pilot, sections, summary
from benchmarks.experiment.alarms import HEALTHY, Firings, cases_of, chosen
from benchmarks.experiment.change import reference_for
from benchmarks.experiment.drills import Drilled
from benchmarks.experiment.pictures import ARMS, Point, called
from benchmarks.experiment.record import Run
from benchmarks.experiment.tables import SHORT, faults_by_guards

_PAGE = """\
# Broken weight syncs: which checks find them, and the reward they cost

`python -m benchmarks.experiment.page` writes this page from the records in
`benchmarks/experiment/results/`. A test fails if the page and the records disagree.

## The question

A trainer updates one set of weights, and a rollout engine samples with its own copy of them. A
weight sync keeps the copy up to date. If the sync leaves out a part of the weights, the two
policies differ: a training-inference mismatch. This experiment answers four questions:

- Which checks detect the fault, and at which training step?
- How much reward does the fault cost?
- Does a correction by importance weights (TIS, MIS) repair the damage?
- Does the contract's bound on the gradient bias hold where the true bias can be computed exactly?

The answers, for the small model of this page:

{answers}

## The protocol

{settings}

- **Task**: sums of two three-digit numbers. A prompt shows {given} of the three digits worked out,
  and the model writes the rest. The reward is 1 for the right sum, else 0.
- **Cases**: {cases}.
  In a stale case the sync leaves this part of the weights out from the first step on. With "wrong
  temperature" the engine samples at another temperature than it reports. In the adapter cases a
  LoRA adapter is trained instead of the weights. With "4 bits" the engine quantises the weights at
  every sync, which is intended.
- **Arms**: {arms}. TIS multiplies a token's loss by min(w, 2). MIS multiplies it by w inside
  [0.5, 2] and by 0 outside. Here w is the trainer's probability divided by the engine's. The
  monitor follows the rules of `benchmarks/experiment/grpo.kernelcontract.yaml`: it corrects and
  masks if the gradient clause is violated, and halts the run if the bias left after the correction
  exceeds its limit. The last arm starts with the preflight sync test. If the test finds a fault,
  the sync is repaired before the run starts, and the repaired run is counted.
- **Seeds**: {seeds}. A seed fixes prompts, samples and evaluation for all arms and cases.
- **Intervals** are 95 % Student's t intervals over seeds. {seed_count} seeds are few, so this page
  also lists each of them.
- **Machine**: {versions}; one thread. {hours}

The code that trained the models is no longer in the repository. Its history has it, in
`benchmarks/experiment` of revision `d9ed851a`.

### Pilot: the learning rate

The pilot checks at which learning rate an uncorrected run learns. Each line has the mean reward of
the trained policy on its training problems every ten steps, for one seed after the other. All runs
use the largest rate at which the healthy policy ends at {learnt} or better with every seed:
{chosen:g}. We wrote this rule down after the first runs had started at that rate.

```text
{pilot}
```

## Which check fires, and when

The threshold checks below are documented, asserted or shipped by other projects, with these
thresholds. Servanda's own checks are in bold. All of them read the same uncorrected runs,
except the preflight test, which runs before a run starts. In the rules, p is the trainer's
probability of a sampled token, q the engine's, and d = log p − log q.

A number of the table is the first training step at which a check fires, as a range over seeds;
"before 0" is before the first update. Brackets mark a check that also fires on a healthy run.

![The training step at which each check first fires, by case](experiment_guards.svg)

{short}

{noticed}

{sharp}

{slower}

**servanda change** asks another question than the limits: whether the gap has changed, harmful or
not. Its reference is the healthy bfloat16 runs of the other seeds, without their first step. The
promise: {promise}.
The engine with 4 bits is another set-up: it needs a reference of its own, and is called changed
against this one.

**servanda follow** asks whether the engine changes as the trainer does, by 640 probe tokens after
each sync, with the trainer's weights rounded to bfloat16. It needs no reference and no limit in
nats. It is violated if the slope of the engine's change on the trainer's is outside 1 ± 0.05, so a
part of the weights that makes less than 5 % of the change is not found; the preflight test finds
it. Its confidence, 95 %, is for the whole run.

Other projects chose these thresholds on models of 8 B parameters and more; here the model has
2.6 M. Six of the cases were run once, and the first step of one seed says nothing about the
spread. The 180 healthy steps come from 6 runs, so "0 of 180" is compatible with an alarm on up to
40 % of healthy runs (95 % confidence).

### Outcomes of the monitor

The table counts the monitor's outcomes over all seeds of the uncorrected runs. The monitor reports
*violated* only with enough evidence; if the few tokens of a step do not decide, it reports
*inconclusive*. A cell is one clause on one slice.

{monitor}

At step 0 no sync has transferred an update yet, so no passive check can detect a fault of the sync:
every statistic equals that of the healthy run. "Wrong temperature" is a fault of the sampler and
differs from the first step on.

{start}

### The preflight sync test

The test needs no training step. It randomises the trainer's weights, syncs once, scores {tokens}
tokens on both sides, and then perturbs one group of weights at a time. The table has one test for
each fault of a sync, all on the same model. In {restored} of {drilled} tests the trainer's weights
were restored bit for bit.

{drills}

{cost}

{randomised}

### All checks and their sources

{guards}

{notes}

<details><summary>All checks, case by case</summary>

{all_guards}

</details>

## The cost in reward

![Reward over updates, by case and arm](experiment_rewards.svg)

The first table has the reward on the training problems, with the trainer's own weights in float32,
after the last update or at the step at which the arm halted the run. A case that was run once has
one seed and no interval.

{rewards}

The second table has the reward on held-out problems, on which no run trains:

{held_out}

<details><summary>Every seed</summary>

{every_seed}

</details>

## The true gradient bias and its bound

After {checkpoints} updates, for {prompts} prompts, the experiment enumerates every response that
has enough probability under either kernel. This gives the exact mean of the trainer's gradient
estimator, the gradient that it should estimate, and the difference of the two: the bias. The bound
is A × G × D. A is the largest advantage that a group of {group} admits, G = √2 is the largest score
norm of the gradient by logits, and D is the gap that the weighting leaves
([the chain of bounds](chain.md)). Responses that were not enumerated have a total probability of
{rest}. Bias and bound both refer to the enumerated contexts.

![The true bias against its bound and against two metrics](experiment_truth.svg)

{bounds}

{crossed}

The next table has the bias as a share of the signal, as the mean over seeds, in runs without a
correction:

{bias}

The last table shows how well a statistic of a step ranks the checkpoints by their true bias:

{order}

## Which arms helped, and which did not

The tables have the reward of an arm minus that of the same seed without a correction. On the
training problems:

{differences}

On held-out problems:

{held_out_differences}

{helped}

{by_heart}

## Limits

- One model of 2.6 M parameters, one task, one machine without a GPU. At a learning rate of {rate}
  faults grow within a few steps; at the smaller rates of large models they take longer.
- At most {seed_count} seeds. The intervals assume that the results of the seeds are normally
  distributed.
- Each fault is present from the first step. If a fault begins later, the monitor and the threshold
  checks can detect it; the preflight test detects it only if you run it again.
- The prompts are the same at every step, so that a small model learns in few steps. It memorises
  them.
- The engine is Transformers in bfloat16, in the same process as the trainer.
"""


def page(
    runs: Sequence[Run],
    drills: Sequence[Drilled],
    tried: Sequence[Run],
    fired: Firings,
    points: Sequence[Point],
) -> str:
    """The page.

    Args:
        tried: runs of the pilot.
    """
    cases, seeds = cases_of(runs), sections.seeds_of(runs)
    first = chosen(runs, HEALTHY, "none")[0]
    return _PAGE.format(
        answers=summary.answers(runs, fired, points),
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
        short=faults_by_guards(fired, SHORT),
        noticed=sections.noticed(fired),
        sharp=sections.sharp(fired),
        slower=answers.slower(runs, fired),
        promise=reference_for(first, chosen(runs, HEALTHY, "none")).promise,
        monitor=answers.monitor_table(runs),
        start=sections.equal_at_start(runs),
        tokens=drills[0].tokens,
        restored=sum(drill.restored for drill in drills),
        drilled=len(drills),
        drills=sections.drill_table(drills),
        cost=sections.drill_cost(runs),
        randomised=sections.randomised(drills),
        guards=sections.guard_list([*fired]),
        notes=sections.guard_notes(runs),
        all_guards=faults_by_guards(fired, [*fired]),
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
