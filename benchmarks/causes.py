"""Which cause a dump with a known fault is given: a table of faults and causes.

python -m benchmarks.causes --measure     writes benchmarks/measured/causes.json; an hour of CPU
python -m benchmarks.causes --write       writes docs/explanation/causes.md from it

Logprobs of faulty kernels are kept in build/causes/, so that a second run takes minutes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.field import (
    eighth_unseen_causes,
    eleventh_unseen_causes,
    fifth_unseen_causes,
    fourth_unseen_causes,
    more_unseen_causes,
    ninth_unseen_causes,
    seventh_unseen_causes,
    sixth_unseen_causes,
    tenth_unseen_causes,
    third_unseen_causes,
    unseen_causes,
)

from benchmarks.causes_dumps import FAULTS, MODELS, ROWS, STEPS, Dump, dumps
from benchmarks.contradictions import LAW, contradictions
from benchmarks.experiment.tables import markdown
from benchmarks.rules import share
from servanda.judgement.causes.catalogue import UNEXPLAINED
from servanda.judgement.causes.gap_cause import UNEVEN
from servanda.rl.dumps.judge import DumpOptions, judge_dump

ROOT = Path(__file__).parents[1]
MEASURED = ROOT / "benchmarks" / "measured" / "causes.json"
# of names that the cases were given, and that data cannot separate: those that say both now
ONE_NAME = {
    "attention_window": {"long_context"},
    "positions": {"long_context"},
    "softcap": {"temperature"},
    "template": {"beginning"},
    "padding": {"beginning"},
    "old_weights": {"stale_cache"},
    "stale_replica": {"stale_cache"},
    "precision_drift": {"stale_weights"},
    "stale_cache": {"stale_weights"},
}
SETS = {
    "first set": unseen_causes.FOUND,
    "second set": more_unseen_causes.FOUND,
    "third set": third_unseen_causes.FOUND,
    "fourth set": fourth_unseen_causes.FOUND,
    "fifth set": fifth_unseen_causes.FOUND,
    "sixth set": sixth_unseen_causes.FOUND,
    "seventh set": seventh_unseen_causes.FOUND,
    "eighth set": eighth_unseen_causes.FOUND,
    "ninth set": ninth_unseen_causes.FOUND,
    "tenth set": tenth_unseen_causes.FOUND,
    "eleventh set": eleventh_unseen_causes.FOUND,
}
UNSEEN = ROOT / "benchmarks" / "measured" / "causes_unseen.json"
PAGE = ROOT / "docs" / "explanation" / "causes.md"

_TEXT = """\
# Which cause a gap is given

`servanda check DIR` names a likely cause of a gap, or says *unexplained*. This page states how the
cause is found, and how often it is right. [Check a dump](../how-to/check_a_dump.md) shows you the
output. Dumps that are watched, monitors, comparisons of kernels and diverted slices of live traffic
get their cause by the same functions.

## The rule

A cause is looked for where a mean over tokens is beyond its limit. A dump that holds or is
inconclusive has none. Where single responses alone are beyond a limit, the finding about them is
what is said, and where the run has changed against good runs, the change.

1. **A failed data check is the cause**, in its own words, and no other is looked for. Only for a
   mean weight above 1, which several mistakes can give, step 3 says which one it was.
2. **Where.** The sequences of each step are divided into two parts before anything is examined.
   The first part chooses: a greedy search over steps, labels, prompt length, position (from the
   start, from the end, modulo block sizes), turn, token id, age of the weights and index in the
   step finds the one or two conditions that separate tokens best. Tokens are compared with others
   of about the same logprob, because rare tokens differ more between any two kernels. The second
   part tests the slice once: a bounded e-value over its sequences has to show that the slice's mean
   of |p − q| / (p + q) is above twice the mean of similar tokens outside. At most three slices are
   tested, each at a third of 1 %. If no slice explains half of the excess, each sequence is tested
   by itself.
3. **Which transform**, on the tokens of that place, or on all of them. Each is fitted on the first
   part and judged on the second by the gap that it leaves. Some predict the other side's number:
   another unit, a shift, rounding, a bound, one number for many, other tokens. Settings of the
   sampler (a cut, a temperature for all or by sequence, a penalty) depend on probabilities that no
   record has; they leave the gap to the nearest pair of numbers that is possible under them, and
   that is compared with what they leave of the same gap with signs at random, as noise has them.
4. **Which shape.** Without a place and a transform: growth over the steps or along the context, a
   jump, age, few tokens anywhere, token ids, or a function of the logprob.
5. **Named or not.** A cause is named if it explains at least 80 % of the gap above noise (90 % for
   a cut or a temperature), leaves the rest within the limit, and explains clearly more than the
   next one; of causes that explain alike, the one with fewer parameters. Of two places that are
   labels or steps, or of such a place and a transform elsewhere, the larger is named, and what
   remains is said. A place is not named where another field cuts out nearly the same tokens, unless
   the tokens that only one of the two has say in which the gap is. The first tokens of the answers,
   or the short prompts, are a place and no cause: a template, a BOS token, padding, a cached prefix
   and others are felt there. Growth has a cause only where no transform explains 30 % of the gap,
   because its parameter may be what grows. Noise is taken as half of
   the limit, or a quarter of the gap if that is less. A label accuses only the side that it
   belongs to: `rank` the trainer, `replica` and `engine` the engine, any other label the requests;
   where labels of both sides cut out the same tokens, both are said. `numerics`, the same
   everywhere, is said after the test that it is: at equal probability no step, label, turn, quarter
   of a length or position, or violated slice of the contract differs by more than {uneven}, and
   neither sequences nor token ids do, of a gap of at most 0.4 nats a token.
6. **Otherwise** the place, its share, the two likeliest causes, and the command that separates
   them.

These pairs of statements exclude each other. The benchmark looks for each of them in the answer to
each dump below, and found {contradictions} in {answers} answers:

{law}

What a dump cannot separate has one name. `numerics` may be precision, quantisation, a constant such
as an epsilon, kernels that depend on the batch in every row alike, weights of another checkpoint,
or other tokens before each prompt. `long_context` is a window or a mask that cuts attention, or
positions that are wrong from a length on. `stale_cache` is a prefix cache, one engine of several
that no label tells apart, or responses that were kept. `stale_weights` are updates that the engine
does not have as they are: not sent, rounded, or kept from it by a cache. A temperature, a cap and
another scale of the logits are one name, too. Cases that were written when these had several names
count by any of them, except at the first run.

## Measured

{faults} faults at {strengths} strengths, on {models} models. Each fault is a dump of {steps}
steps and {sequences} sequences that goes through `servanda check`. *Violated* counts the dumps with
a red mean over tokens, or a failed check; the others get no cause and do not count. No class of
causes has more than {largest} of them. *Coverage* is the share of these that get a name;
*precision* is the share of the names that are right. A fault may have more than one right name,
which the table lists.

{held_out}

{summary}

{unseen}

{matrix}

Each fault, and the names that it got:

{table}

{healthy}

Faults marked *engine* were computed with a faulty kernel ([faults](../reference/faults.md)).
Those marked *drawn* use the distributions of a healthy kernel, and a mistake in the sampler.
Those marked *composed* put the logprobs of faulty and healthy kernels together by sequence, step
or token, as replicas, caches and updates do.

`python -m benchmarks.causes --measure --write` measures again and writes this page.
"""


_IN_VIEW = """\
The functions and their thresholds were written with the dumps of these models in view, which are a
real language model and others that are bundled or made from a bundled one. So the table is no
measure of how often a name is right on another model or for another fault. The cases below it
are."""
_HELD_OUT = """\
The functions and their thresholds were written with the dumps of the first row in view. The models
of the second row were not looked at until they were final."""


def judged(dump: Dump) -> dict[str, Any]:
    """The answer to a dump."""
    with tempfile.TemporaryDirectory() as folder:
        dump.write(Path(folder))
        return answered(Path(folder))


def answered(folder: Path) -> dict[str, Any]:
    verdict = judge_dump(DumpOptions(folder)).verdict
    advice = verdict.advice
    named = advice is not None and advice.named and bool(advice.name)
    return {
        "outcome": verdict.outcome,
        "cause": advice.name if advice is not None else "",
        "evidence": advice.cause if named and advice is not None else "",
        "slices": [] if advice is None else [one.entry for one in advice.slices],
        "contradictions": contradictions(verdict),
    }


def measure(only: Sequence[str], models: Sequence[str], few: bool) -> Iterator[dict[str, Any]]:
    for dump in dumps(only, models, few):
        yield {**dump.about, **judged(dump)}


def unseen() -> Iterator[dict[str, Any]]:
    """The answers to the cases that were written before their first run."""
    for case in itertools.chain(*SETS.values()):
        with tempfile.TemporaryDirectory() as folder:
            case.make(Path(folder), 0)
            names = case.causes.union(*(ONE_NAME.get(name, ()) for name in case.causes))
            about = {"case": case.name, "kind": case.kind, "causes": sorted(names)}
            row = about | answered(Path(folder))
        print(
            case.name, row["outcome"], row["cause"], _right(row), "|", row["evidence"], flush=True
        )
        yield row


def _asked(row: dict[str, Any]) -> bool:
    """Whether a cause was looked for: a mean over tokens is beyond its limit, or a check failed."""
    return bool(row["cause"])


def _right(row: dict[str, Any]) -> str:
    if not _asked(row):
        return "not asked"
    if row["cause"] == UNEXPLAINED:
        return UNEXPLAINED
    causes = row["causes"] if "causes" in row else FAULTS[row["fault"]].causes
    return "right" if row["cause"] in causes else "wrong"


def scores(rows: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    """Dumps that ask for a cause, named, precision and coverage of some rows with a fault."""
    found = Counter(map(_right, rows))
    asked = sum(map(_asked, rows))
    named = found["right"] + found["wrong"]
    return (
        str(asked),
        str(named),
        share(found["right"], named),
        f"{named / max(asked, 1):.2f}",
        str(len(rows) - asked),
    )


def matrix(rows: Sequence[dict[str, Any]]) -> str:
    """True cause against given cause: all models, and held out."""
    lines = []
    for cause in dict.fromkeys(FAULTS[row["fault"]].causes[0] for row in rows):
        own = [r for r in rows if FAULTS[r["fault"]].causes[0] == cause and _asked(r)]
        held = [r for r in own if not MODELS[r["model"]].looked_at]
        lines.append((cause, *(part for of in (own, held) for part in _given(of))))
    return markdown(("cause", "right", "given instead", "held out: right", "given instead"), lines)


def _given(rows: Sequence[dict[str, Any]]) -> tuple[str, str]:
    wrong = Counter(r["cause"] for r in rows if _right(r) != "right")
    right = sum(_right(r) == "right" for r in rows)
    return f"{right} of {len(rows)}", ", ".join(f"{c} {n}" for c, n in wrong.most_common()) or "-"


def page(rows: Sequence[dict[str, Any]], new: Mapping[str, Sequence[dict[str, Any]]]) -> str:
    broken = [row for row in rows if FAULTS[row["fault"]].causes]
    held = [r for r in broken if not MODELS[r["model"]].looked_at]
    names = [m for m, model in MODELS.items() if not model.looked_at or model.folder]
    parts = {
        "written with them in view": [r for r in broken if MODELS[r["model"]].looked_at],
        "held out": held,
        **{f"of these {name}": [r for r in broken if r["model"] == name] for name in names},
    }
    head = ("models", "asked for a cause", "named", "right", "coverage", "not asked")
    table = []
    for name, fault in FAULTS.items():
        if not fault.causes:
            continue
        own = [r for r in held or broken if r["fault"] == name]
        given = Counter(r["cause"] for r in own if _asked(r))
        table.append(
            (
                name,
                fault.kind,
                " or ".join(fault.causes),
                ", ".join(f"{cause} {n}" for cause, n in given.most_common()) or "-",
                str(sum(not _asked(r) for r in own)),
            )
        )
    asked = [r for r in broken if _asked(r)]
    classes = Counter(FAULTS[r["fault"]].causes[0] for r in asked)
    healthy = [r for r in rows if not FAULTS[r["fault"]].causes]
    healthy += [r for r in new["first"] if r["kind"] == "healthy"]
    said = sum(_asked(r) for r in healthy)
    answers = [*rows, *new["now"]]
    return _TEXT.format(
        contradictions=sum(len(r["contradictions"]) for r in answers) or "none",
        answers=len(answers),
        law="\n".join(f"- {pair}" for pair in LAW),
        faults=len({r["fault"] for r in broken}),
        strengths=len({(r["fault"], str(r["strength"])) for r in broken}),
        models=len({r["model"] for r in rows}),
        held_out=_HELD_OUT if held else _IN_VIEW,
        steps=STEPS,
        sequences=ROWS,
        uneven=f"{UNEVEN:g} times",
        largest=f"{100 * max(classes.values()) / len(asked):.0f} %",
        summary=markdown(head, [(name, *scores(of)) for name, of in parts.items() if of]),
        unseen=_unseen(new),
        table=markdown(("fault", "made", "right causes", "given", "not asked"), table),
        matrix=matrix(broken),
        healthy=f"Of {len(healthy)} healthy dumps {said} got a cause. A slow test holds the rate "
        "of slices in 240 draws that are alike everywhere (`tests/slow/test_slice_search.py`).",
    )


def _unseen(new: Mapping[str, Sequence[dict[str, Any]]]) -> str:
    """The cases that were committed with their causes before the first run."""
    now = {row["case"]: row for row in new["now"]}
    lines = [
        (
            row["case"],
            " or ".join(row["causes"]) or "none",
            row["outcome"],
            row["cause"] or "none",
            now[row["case"]]["cause"] or "none",
        )
        for row in new["first"]
    ]
    counted = []
    for name, cases in SETS.items():
        own = {case.name for case in cases}
        for kind, what in (("fault", "faults"), ("unsound", "unsound dumps")):
            for when in ("first", "now"):
                of = [r for r in new[when] if r["kind"] == kind and r["case"] in own]
                if not of:
                    continue
                asked, named, right, coverage, _ = scores(of)
                at = "at the first run" if when == "first" else "now"
                counted.append((f"{name}: {len(of)} {what}, {at}", asked, named, right, coverage))
    head = ("cases", "asked for a cause", "named", "right", "coverage")
    return (
        "Cases that were written without a look at the source, with their right names committed "
        "before the first run (`tests/field/*unseen_causes.py`):\n\n"
        + markdown(head, counted)
        + "\n\n"
        + markdown(("case", "right causes", "verdict", "cause at the first run", "now"), lines)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--only", nargs="*", default=())
    parser.add_argument("--few", action="store_true", help="One strength of each fault.")
    parser.add_argument("--models", nargs="*", default=())
    parser.add_argument("--unseen", action="store_true", help="The cases of tests/field.")
    args = parser.parse_args()
    if args.measure:
        known = json.loads(MEASURED.read_text(encoding="utf-8")) if args.models else []
        rows = [row for row in known if row["model"] not in args.models]
        for row in measure(args.only, args.models, args.few):
            print(
                row["model"],
                row["fault"],
                row["strength"],
                row["outcome"],
                row["cause"],
                _right(row),
                "|",
                row["evidence"],
                flush=True,
            )
            rows.append(row)
            if not args.only:
                MEASURED.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    if args.unseen:
        new = json.loads(UNSEEN.read_text(encoding="utf-8"))
        new["now"] = [*unseen()]
        known = {row["case"] for row in new["first"]}
        new["first"] += [row for row in new["now"] if row["case"] not in known]
        UNSEEN.write_text(json.dumps(new, indent=1) + "\n", encoding="utf-8")
    if args.write:
        rows = json.loads(MEASURED.read_text(encoding="utf-8"))
        new = json.loads(UNSEEN.read_text(encoding="utf-8"))
        PAGE.write_text(page(rows, new), encoding="utf-8")


if __name__ == "__main__":
    main()
