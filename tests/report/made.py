# Verdicts that were never measured: every outcome, every absence, and hostile names.

import math
from dataclasses import replace

from servanda.contract.identity import EvidenceKey
from servanda.errors import Where
from servanda.judgement.clauses.base import CellVerdict
from servanda.judgement.token_profile import EDGES, RATIO_EDGES, Portrait, Sums, Worst
from servanda.judgement.verdict import Caught, Circumstances, Verdict

HOSTILE = (
    "a<script>alert('1')</script>|`x` \"q\" & ]]> --> 😀 @team #1 % :: \x00\x1b\n,http://x.y/z"
)
KEY = EvidenceKey("c" * 32, "d" * 32, "e" * 32, "f" * 32, "0" * 32)
WHERE = Where("dir with space/c:x.yaml", 29, 5, "  - {id: tv}")


def sums(n=1000, tv=0.01, flips=0.02):
    d = 1.2 * tv
    means = (tv, d, math.exp(d), d / 10, d * d, tv / 2, flips)
    return Sums(n, *(n * mean for mean in means), flips_n=n, nll_train=1.0 * n, nll_infer=1.0 * n)


def portrait(tv=0.01, slices=("all", "long"), worst=True):
    """Drift grows 50-fold at prompts of 256 tokens."""
    by = {name: [Sums()] * (len(edges) + 1) for name, edges in EDGES.items()}
    by["prompt_tokens"][4], by["prompt_tokens"][5] = sums(9000, tv / 5), sums(1000, 10 * tv)
    by["position"][2] = sums(10000, tv)
    counts = tuple(10 if i in (3, 20, 40) else 0 for i in range(len(RATIO_EDGES) + 1))
    token = Worst(2.5, 3, 1, 7, 301, 42, 0.62, 0.04, 1.5, 4.0, (1, 2, 3))
    return Portrait(
        sums(10000, tv),
        {name: tuple(bins) for name, bins in by.items()},
        {name: sums(1000, tv, 0.24) for name in slices},
        (counts, counts),
        (token, replace(token, abs_log_ratio=math.inf, p_train=0.0, rank=None)) if worst else (),
    )


def cell(outcome="holds", **changes):
    if outcome == "violated" and changes.get("kind") != "guard":
        changes = {"value": 0.15, "interval": (0.11, 0.2), **changes}
    made = CellVerdict(
        clause="tv",
        section="statistical",
        metric="tv",
        aggregate="mean",
        slice="all",
        outcome=outcome,
        kind="certificate",
        claim="population",
        value=0.01,
        interval=(0.005, 0.02),
        limit=0.03,
        floor=0.0005,
        share=1.0,
        workload="workload",
        n=832,
        units="prompt groups",
        alpha=0.025,
        e_holds=4.2,
        e_violated=-math.inf,
        where=WHERE,
    )
    return replace(made, **changes)


def guards(outcome="holds"):
    usable = {"kind": "fact", "section": "observability", "aggregate": "", "interval": None}
    usable["floor"] = None
    return [
        cell("holds", clause="finite", metric="usable_ratio", value=1.0, limit=0.999, **usable),
        cell(
            outcome,
            **{**usable, "kind": "guard"},
            clause="fidelity",
            metric="sampler_fidelity",
            value=None,
            limit=None,
        ),
    ]


def verdict(outcome="holds", cells=None, **changes):
    made = Verdict(
        outcome=outcome,
        cells=tuple(cells if cells is not None else [cell(outcome), *guards()]),
        contract="toy",
        stage="offline",
        key=KEY,
        evidence="a" * 32,
        confidence=0.95,
        alpha=0.025,
        price_cells=2,
        groups=832,
        sequences=832,
        tokens=19690,
        lost=0,
        golden_tokens=100,
        train="table p.json",
        infer="table q.json",
        portraits={"infer": portrait(), "self_infer": portrait(0.001), "golden": portrait()},
        circumstances=Circumstances(
            {"train": {"dtype": "float32", "os": "x"}, "infer": {"dtype": "bfloat16", "os": "x"}},
            140.0,
            "decided",
            "kind: KernelContract\n",
        ),
    )
    return replace(made, **changes)


def broken(name="long", **changes):
    bad = cell("violated", clause="tv-long", slice=name, value=0.17, interval=(0.12, 0.27))
    bad = replace(bad, limit=0.1, share=0.01, n=50)
    cells = [bad, cell(), cell(slice="domain=json", share=0.5), *guards()]
    made = verdict("violated", cells, portraits={"infer": portrait(slices=("all", name))})
    return replace(made, **changes)


def many(n):
    """A slice a cell; every seventh is not decided."""
    cells = [
        cell("inconclusive" if i % 7 == 0 else "holds", slice=f"d={i}", share=1 / n, more=100)
        for i in range(n)
    ]
    return verdict("inconclusive", [*cells, cell(), *guards()])


BARE = verdict(
    "inconclusive",
    [cell("inconclusive", value=None, interval=None, floor=None, n=0, e_holds=None, where=None)],
    portraits={},
    circumstances=Circumstances(),
    groups=0,
    sequences=0,
    tokens=0,
    golden_tokens=0,
    train="",
    infer="",
)
GOLDEN = verdict(
    "violated",
    [
        cell(
            "violated",
            clause="drift",
            section="numerical",
            metric="logit_osc_nats",
            aggregate="max",
            kind="fact",
            value=math.inf,
            interval=None,
            limit=2.0,
            share=None,
            workload="",
            units="golden positions",
            alpha=None,
        )
    ],
    portraits={"golden": portrait(slices=())},
    groups=0,
    sequences=0,
    tokens=0,
)
NAMED = broken(HOSTILE)
NAMED = replace(
    NAMED,
    contract=HOSTILE,
    train=HOSTILE,
    infer=HOSTILE,
    stable=HOSTILE,
    cells=tuple(
        replace(c, clause=f"{i}{HOSTILE}", note=HOSTILE) for i, c in enumerate(NAMED.cells)
    ),
    circumstances=Circumstances({"train": {HOSTILE: HOSTILE}, "infer": {}}, 1.0, "size", HOSTILE),
    power=(Caught(HOSTILE, HOSTILE, (HOSTILE,), HOSTILE), Caught("b", "blind", (), HOSTILE)),
    portraits={
        "infer": replace(
            portrait(),
            worst=(replace(portrait().worst[0], text=HOSTILE, context_text=HOSTILE),),
        ),
        "stable": portrait(0.002, ("all", HOSTILE)),
    },
)
_FAR = "infer is from train 34 [4.00, ∞] times as far as train in bfloat16 is"
_NEAR = "infer is from train 1.00 [0.93, 1.04] times as far as train in bfloat16 is"
_BY_COST = f"this is what bfloat16 costs: {_NEAR}, limit 1.25"
FORMAT = verdict(
    "violated",
    [
        cell(
            value=0.018,
            rounding=f"agrees to bfloat16 rounding: {_NEAR}",
            note=_BY_COST,
            reason="format cost",
        ),
        cell(
            "violated",
            slice="long",
            value=0.3,
            rounding=f"differs by more than bfloat16 rounding: {_FAR}",
            note=f"{_FAR}, limit 1.5",
        ),
        cell(slice="b", rounding=f"differs about as bfloat16 rounding does: {_NEAR}"),
        *guards(),
    ],
    circumstances=Circumstances(differences=("The files differ.",)),
)
VERDICTS = {
    "holds": verdict(),
    "number format": FORMAT,
    "violated": broken(),
    "inconclusive": verdict(
        "inconclusive", [cell("inconclusive", more=3100, open=True), *guards()]
    ),
    "error": verdict(
        "error",
        [cell("inconclusive"), cell("error", metric="usable_ratio", section="observability")],
        lost=12,
    ),
    "unfaithful": verdict("violated", [cell("inconclusive"), *guards("violated")]),
    "everywhere": verdict("violated", [cell("violated", slice=s, share=0.2) for s in "abc"]),
    "whole": verdict("violated", [cell("violated"), cell(slice="long", share=0.1), *guards()]),
    "not judged": verdict("inconclusive", [cell("not applicable", kind=""), *guards()]),
    "watched": verdict(cells=[cell(), cell("violated", slice="b", enforced=False), *guards()]),
    "stable": broken(
        stable="table r.json",
        portraits={
            "infer": portrait(slices=("all", "long")),
            "stable": portrait(0.002, ("all", "long")),
        },
    ),
    "percentile": verdict(
        "violated",
        [cell("violated", metric="abs_log_ratio_nats", aggregate="p90", threshold=0.03, limit=0.1)],
    ),
    "negative": verdict(cells=[cell(metric="mass_gap", value=-0.01, interval=(-0.02, 0.005))]),
    "no cell": verdict("inconclusive", []),
    "sixty slices": many(60),
    "nothing measured": BARE,
    "golden only": GOLDEN,
    "hostile": NAMED,
}
