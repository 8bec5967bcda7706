# Made steps with known truth, and the verdict on them by the exact path of `servanda check`.

import numpy as np

from servanda.contract.identity import EvidenceKey
from servanda.judgement.evidence import Evidence, Round, weigh
from servanda.judgement.schedule import Unit
from servanda.judgement.slices.rules import LABEL
from servanda.judgement.verdict import judge
from servanda.rl.monitor.batch import Batch
from servanda.traces.trace import pair

Q = 0.6


def step(rng, size=16, width=128, tv=0.004, *, prompts=0, turns=1, dtype=np.float32):
    """Both logprobs and the mask of sequences whose every context has TV `tv`, [B, T] each.

    Args:
        tv: a number, or [B, T].
        prompts: columns before the first trained one; turns: stretches of trained tokens.
    """
    tv_BT = np.broadcast_to(tv, (size, width))
    first_BT = rng.random((size, width)) < Q
    infer_BT = np.where(first_BT, np.log(Q), np.log(1 - Q))
    # the more probable token stays so where it can, as with real kernels
    p_BT = Q + np.where((tv_BT < Q - 0.5) | (tv_BT >= 1 - Q), -tv_BT, tv_BT)
    train_BT = np.where(first_BT, np.log(p_BT), np.log(1 - p_BT))
    mask_BT = np.zeros((size, width), dtype=bool)
    for b, end in enumerate(rng.integers(width // 2, width, size)):
        mask_BT[b, prompts:end] = True
        for turn in range(1, turns):
            at = prompts + (end - prompts) * turn // turns
            mask_BT[b, at : at + 4] = False
    return train_BT.astype(dtype), infer_BT.astype(dtype), mask_BT


def exactly(monitor, train_BT, infer_BT, mask_BT, *, weights=0, **given):
    """The verdict of the exact path on the cells of a monitor that has seen a step."""
    plan = monitor._plan
    batch = Batch.of(train_BT, infer_BT, mask_BT, weights=weights, **given)
    per_token = {}
    if batch.staleness_BT is not None:
        per_token["staleness"] = np.broadcast_to(batch.staleness_BT, mask_BT.shape)
    labels = {name: list(values) for name, values in batch.labels.items()}
    whole = pair(
        train_BT, infer_BT, mask_BT, groups=batch.group_B, labels=labels, per_token=per_token
    )
    prompts = plan.corpora["workload"].prompts
    asked = {f.removeprefix(LABEL) for cell in plan.cells for f in cell.cut.fields}
    rows = []
    for b in range(len(mask_BT)):
        mine = {n: v[b] for n, v in labels.items() if n in asked}
        rows.append(next((r for r, p in enumerate(prompts) if p.labels == mine), 0))
    groups = {g: i for i, g in enumerate(dict.fromkeys(whole.group_S))}
    units = tuple(Unit(b, rows[b], groups[whole.group_S[b]]) for b in range(len(rows)))
    key = EvidenceKey(plan.contract.digest, "", "external", "external", str(weights))
    found = weigh(plan, key, [Round("workload", 0, units, whole)])
    return judge(plan, Evidence(key, plan.digest, dict(found.rounds)))
