# How often a verdict is wrong, measured: seeded `check` runs on kernels whose truth is known.
#
#     make truth                            runs every case as a test, then writes the page
#     python -m benchmarks.truth --runs 50  a quick look, printed only
#
# Each run draws, measures and evaluates as `servanda check` does: after every closed round, until
# it is decided or its size is reached.  An answer is wrong when it says `holds`
# though the truth is the limit or more, or `violated` though it is the limit or less.  For
# the claim `population` the truth is the enumerated mean TV over the prompts; for `realised`
# it is the mean of the exact TV at the very contexts that were measured.

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import statistics
import tempfile
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path

from tests import kit
from tests.table_pair import TablePair

from benchmarks.committed import KEPT
from servanda.errors import Interrupted
from servanda.judgement.evidence import weigh
from servanda.judgement.verdict import Verdict, judge
from servanda.runner import run
from servanda.runner.measurement import Progress, Watch
from servanda.runner.round_files import read_rounds
from servanda.runner.run_directory import RunDirectory, opened
from servanda.runner.sequential import gather

LIMIT = 0.1
RATIOS = (0.5, 0.9, 1.0, 1.1, 2.0)
FEW = (0.5, 1.0, 2.0)  # for the variations: at the limit itself a wrong answer is likeliest
CLAIMS = ("population", "realised")
RUNS = 500
CONFIDENCE = 0.95
ROUND, LAST, WIDTH = 32, 640, 6
PROCESSES = 2
ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs" / "explanation" / "truth.md"
RECORDS = ROOT / "build" / "truth"  # a file a case, as they end
MEASURED = KEPT / "truth.json"  # all of them: what the page is written from
_ANSWERS = ("holds", "violated", "inconclusive")
MARGIN = 2.326  # one-sided 99 % of the normal approximation to the binomial

Rows = dict[str, list[float]]


@dataclass(frozen=True)
class Scenario:
    """Two tables by a scale of divergence, and what else is done to a run."""

    name: str
    about: str
    p: Rows
    q: Callable[[float], Rows]
    prompts: tuple[str, ...] = ("a", "b", "c")
    infer: str = ""
    more: str = ""
    samples: int = 1
    disturbed: bool = False
    ratios: tuple[float, ...] = FEW

    def at(self, ratio: float) -> Rows:
        """The infer table whose population mean TV is ratio x LIMIT."""
        low, high = 0.0, 0.3
        for _ in range(60):
            middle = (low + high) / 2
            if self.mean_tv(middle) < ratio * LIMIT:
                low = middle
            else:
                high = middle
        return self.q((low + high) / 2)

    def mean_tv(self, scale: float) -> float:
        with tempfile.TemporaryDirectory() as folder:
            _, pair = kit.write(folder, p=self.p, q=self.q(scale))
        prompts = [(kit.TOKENS.index(text),) for text in self.prompts]
        return pair.mean_tv(prompts, WIDTH)


def _even(scale: float) -> Rows:
    return {"": kit.moved(kit.BASE, scale)}


# a prompt of kind d ends at once unless it meets d again; c goes on for long
_LONG = {
    "": [0.3, 0.3, 0.0, 0.0, 0.4],
    "c": [0.0, 0.0, 0.95, 0.0, 0.05],
    "d": [0, 0, 0, 0.02, 0.98],
}
_KINDS = {"": kit.BASE, "d": [0.1, 0.1, 0.1, 0.6, 0.1]}
_LOSSY = "observability: {clauses: [{id: usable, metric: valid_ratio, at_least: 0.5}]}"

SCENARIOS = (
    Scenario("plain", "every context diverges alike", {"": kit.BASE}, _even, ratios=RATIOS),
    Scenario(
        "clustered",
        "one prompt in eight carries most of the divergence; 4 samples a prompt",
        _KINDS,
        lambda s: {"": kit.moved(kit.BASE, s / 4), "d": kit.moved(_KINDS["d"], 2 * s, 3, 0)},
        prompts=("a", "b", "c", "a", "b", "c", "a", "d"),
        samples=4,
    ),
    Scenario(
        "lengths",
        "long sequences diverge, short ones do not",
        _LONG,
        lambda s: _LONG | {"c": kit.moved(_LONG["c"], min(s, 0.9), 2, 3)},
        prompts=("c", "d", "d"),
    ),
    Scenario(
        "missing",
        "one sequence in fifty is lost, the longer the likelier",
        {"": kit.BASE},
        _even,
        infer=", fault: {lost_sequences: 0.03}",
        more=_LOSSY,
    ),
    Scenario(
        "resumed",
        "interrupted at a random round, resumed, shards merged in random order",
        {"": kit.BASE},
        _even,
        disturbed=True,
    ),
)


@dataclass(frozen=True)
class Row:
    """What came of the runs of one scenario at one ratio under one claim."""

    scenario: str
    claim: str
    ratio: float
    runs: int
    answers: dict[str, int]
    wrong: int
    median_groups: float | None  # at the answer, of the runs that answered; None of none

    @property
    def allowed(self) -> float:
        alpha = 1 - CONFIDENCE
        return alpha + MARGIN * math.sqrt(alpha * (1 - alpha) / self.runs)


def workers() -> ProcessPoolExecutor:
    """A fresh interpreter each: a fork would copy the threads of Arrow."""
    return ProcessPoolExecutor(PROCESSES, mp_context=get_context("spawn"))


def simulate(
    pool: ProcessPoolExecutor, scenario: Scenario, claim: str, ratio: float, runs: int = RUNS
) -> Row:
    """Run `check` `runs` times and count."""
    job = functools.partial(_one, scenario.name, claim, ratio, scenario.at(ratio))
    results = list(pool.map(job, range(runs), chunksize=25))
    answered = [groups for outcome, _, groups in results if outcome != "inconclusive"]
    return Row(
        scenario.name,
        claim,
        ratio,
        runs,
        dict(Counter(outcome for outcome, _, _ in results)),
        sum(_is_wrong(outcome, truth) for outcome, truth, _ in results),
        statistics.median(answered) if answered else None,
    )


def _is_wrong(outcome: str, truth: float) -> bool:
    # a realised mean that should be the limit comes out a rounding error beside it
    excess, slack = truth / LIMIT - 1, 1e-9
    return (outcome == "holds" and excess >= -slack) or (outcome == "violated" and excess <= slack)


def _one(name: str, claim: str, ratio: float, q: Rows, seed: int) -> tuple[str, float, int]:
    """(outcome of the clause, the truth that its claim is of, prompt groups)."""
    scenario = next(s for s in SCENARIOS if s.name == name)
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as name:
        folder = Path(name)
        path, pair = kit.write(
            folder,
            p=scenario.p,
            q=q,
            prompts=scenario.prompts,
            infer=scenario.infer,
            more=scenario.more,
            samples=scenario.samples,
            claim=claim,
            seed=seed,
            limit=LIMIT,
            confidence=CONFIDENCE,
            round=ROUND,
            first=ROUND,
            last=LAST,
            width=WIDTH,
        )
        verdict = _disturbed(path, folder, seed) if scenario.disturbed else _check(path, folder)
        outcome = next(c.outcome for c in verdict.cells if c.clause == "tv")
        if claim == "population":
            return outcome, ratio * LIMIT, verdict.groups
        return outcome, _realised(path, folder, pair, verdict), verdict.groups


def _check(path: Path, folder: Path, watch: Watch | None = None) -> Verdict:
    """The verdict of `check`, without the table of faults and the report, which decide nothing."""
    plan = run.compile(run.load(path))
    with opened(folder / "run") as directory:
        return judge(plan, gather(plan, directory, run.in_process, watch).evidence)


def _disturbed(path: Path, folder: Path, seed: int) -> Verdict:
    """Stop at a random round, go on, and judge once more from shards in another order."""
    stop_at = ROUND * (1 + seed % (LAST // ROUND))

    def stop(progress: Progress) -> None:
        if progress.what == "prompt groups" and progress.done >= stop_at:
            raise KeyboardInterrupt

    with contextlib.suppress(Interrupted):
        _check(path, folder, stop)
    verdict = _check(path, folder)
    plan = run.compile(run.load(path))
    rounds = list(read_rounds(plan, RunDirectory(folder / "run", 1)))
    shards = [weigh(plan, verdict.key, rounds[i::3]) for i in ((seed + j) % 3 for j in range(3))]
    merged = judge(plan, functools.reduce(lambda a, b: b + a, shards))
    if merged != verdict:
        raise AssertionError(f"seed {seed}: merged shards judge otherwise")
    return merged


def _realised(path: Path, folder: Path, pair: TablePair, verdict: Verdict) -> float:
    """Mean of the exact TV at the contexts of the closed rounds."""
    plan = run.compile(run.load(path))
    ids = {token: i for i, token in enumerate(pair.infer.tokens)}
    values = []
    exact = functools.cache(lambda last: pair.token_tv((last,)))  # tables of order 1
    for measured in read_rounds(plan, RunDirectory(folder / "run", 1)):
        if measured.units[0].group >= verdict.groups:
            break  # drawn ahead, and never judged
        for unit, tokens in zip(measured.units, measured.pair.infer.continuations, strict=True):
            last = ids[plan.corpora["workload"].prompts[unit.row].text]
            for token in tokens:
                values.append(exact(last))
                last = token
    return math.fsum(values) / len(values)


def table(rows: list[Row]) -> str:
    """The counts as Markdown."""
    head = ("scenario", "claim", "TV / limit", "runs", *_ANSWERS, "wrong", "allowed")
    lines = [
        f"| {' | '.join(head)} | median prompt groups |",
        "|---" * (len(head) + 1) + "|",
    ]
    for r in rows:
        shares = " | ".join(f"{r.answers.get(answer, 0) / r.runs:.1%}" for answer in _ANSWERS)
        median = "-" if r.median_groups is None else f"{r.median_groups:.0f}"
        lines.append(
            f"| {r.scenario} | {r.claim} | {r.ratio:g} | {r.runs} | {shares} | "
            f"{r.wrong / r.runs:.1%} | {r.allowed:.1%} | {median} |"
        )
    return "\n".join(lines)


def cases() -> list[tuple[Scenario, str, float]]:
    """Every scenario, claim and ratio that is run."""
    return [(s, claim, ratio) for s in SCENARIOS for claim in CLAIMS for ratio in s.ratios]


_PAGE = """\
# How often a verdict is wrong

The error rate of a verdict is its main property, so it is measured here. This page is written by
`make truth`. Every row is {runs} seeded runs of `servanda check` on two `table` kernels, whose
total variation is known by enumeration. Each run is evaluated after every closed round of {round}
prompt groups, up to {last}, and stops at its first decision. The limit is {limit}, the confidence
{confidence:.0%}.

*Wrong* is `holds` where the true value is the limit or more, or `violated` where it is the limit or
less. The guarantee is an error rate of at most {alpha:.0%}. A measured rate passes up to that plus
the 99 % binomial margin of its number of runs (*allowed*). At exactly the limit both decisions are
errors, so `inconclusive` is the right answer there.

{scenarios}

{table}

The rates are well below the allowed ones for three reasons. A first attempt spends nine tenths of
alpha; the rest is reserved for later attempts with `--fresh`. A violation is corrected for the
number of cells. And a mixture over many alternatives is conservative. The last column shows the
cost in prompt groups.

The counts are kept in `benchmarks/measured/truth.json`. `make truth` repeats the measurement, one
to two hours on two cores, and writes both.
"""


def page(rows: list[Row]) -> str:
    return _PAGE.format(
        runs=rows[0].runs,
        round=ROUND,
        last=LAST,
        limit=LIMIT,
        confidence=CONFIDENCE,
        alpha=1 - CONFIDENCE,
        scenarios="\n".join(f"- **{s.name}**: {s.about}." for s in SCENARIOS),
        table=table(rows),
    )


def record(row: Row) -> None:
    """Keep a row for the page; tests/slow/test_truth.py calls this."""
    RECORDS.mkdir(parents=True, exist_ok=True)
    name = f"{row.scenario}-{row.claim}-{row.ratio:g}.json"
    (RECORDS / name).write_text(json.dumps(asdict(row)))


def recorded() -> list[Row]:
    """The kept rows, in the order of the cases: committed ones, and newer ones of this machine.

    Raises:
        KeyError: names a case that was not run.
    """
    found = json.loads(MEASURED.read_text(encoding="utf-8"))
    found += [json.loads(path.read_text(encoding="utf-8")) for path in RECORDS.glob("*.json")]
    kept = {(row.scenario, row.claim, row.ratio): row for row in (Row(**one) for one in found)}
    return [kept[scenario.name, claim, ratio] for scenario, claim, ratio in cases()]


def main() -> None:
    cli = argparse.ArgumentParser()
    cli.add_argument("--runs", type=int, default=50, help="of each case; printed only")
    cli.add_argument("--write", action="store_true", help="write the page from the kept rows")
    given = cli.parse_args()
    if given.write:
        DOCS.parent.mkdir(parents=True, exist_ok=True)
        rows = recorded()
        lines = ",\n".join(json.dumps(asdict(row)) for row in rows)
        MEASURED.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
        DOCS.write_text(page(rows))
        print(f"wrote {DOCS}")
        return
    with workers() as pool:
        for case in cases():
            print(table([simulate(pool, *case, given.runs)]).splitlines()[-1], flush=True)


if __name__ == "__main__":
    main()
