# The checks of NeMo-RL's test suites as clauses.
#
# A suite calls `check_metrics.py metrics.json 'max(data["train/gen_kl_error"]) < 0.002' ...` on the
# metrics that a run has logged.  Only few of the metrics compare the two kernels; the others are
# listed with the reason, so that none vanishes.

from __future__ import annotations

import ast
import math
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile

from servanda.errors import ContractError, Where

_SCRIPT = "check_metrics.py"
_OVER_STEPS = ("mean", "median", "max", "min")
_OPERATORS = frozenset("();<>|&")  # of a shell: what follows one is another command
_CAP = 1.0  # nats: a mean has a bound only where each value has one
_KL, _RATIO = "gen_kl_error", "token_mult_prob_error"
# of the two kernels, without a clause of the same meaning
_OTHERS = {
    "policy_kl_error": "it weights the infer kernel's tokens as if train had drawn them",
    "js_divergence_error": "js_nats needs the whole vocabulary of both kernels",
    "sampling_importance_ratio": "the check `weight_mean_check` tests that its mean is 1",
}
_ELSEWHERE = "it does not compare the two kernels"
_IDS = {"k3_nats": "gen-kl", "abs_log_ratio_nats": "mult-prob-error"}
_AT = "checks look like 'mean(data[\"train/gen_kl_error\"]) < 0.001'"


@dataclass(frozen=True)
class MetricCheck:
    """One check of a suite.

    Args:
        text: the expression.
        metric: of the clause; "" where none has its meaning; limit: of the clause.
        why: how clause and check are related, or why there is no clause.
    """

    text: str
    metric: str = ""
    limit: float = math.nan
    why: str = ""


def read_checks(text: str, file: str) -> tuple[MetricCheck, ...]:
    """The checks of a script that calls check_metrics.py, or of a file with one check a line.

    Raises:
        ContractError: there is none, or a call cannot be read.
    """
    found = [_check(one) for one in _expressions(text, file)]
    if not found:
        raise ContractError(f"{file} has no checks", hint=f"{_AT}, as arguments of {_SCRIPT}")
    return tuple(found)


def _expressions(text: str, file: str) -> Iterator[str]:
    lines = text.splitlines()
    if _SCRIPT not in text:
        stripped = (line.strip() for line in lines)
        yield from (line for line in stripped if line and not line.startswith("#"))
        return
    number = 0
    while number < len(lines):
        first, call = number, lines[number]
        while call.endswith("\\") and number + 1 < len(lines):
            number += 1
            call = f"{call[:-1]}\n{lines[number]}"
        number += 1
        if _SCRIPT not in call or call.lstrip().startswith("#"):
            continue
        try:
            lexer = shlex.shlex(call, posix=True, punctuation_chars=True)
            lexer.whitespace_split = True
            words = [*lexer]
        except ValueError as error:
            raise ContractError(
                f"a call of {_SCRIPT} cannot be read: {error}",
                where=Where(file, first + 1, 1),
                hint="close its quotes",
            ) from None
        at = next((i for i, word in enumerate(words) if word.endswith(_SCRIPT)), len(words))
        behind = words[at + 2 :]  # the file of metrics
        yield from map(_flat, takewhile(lambda word: not _OPERATORS.issuperset(word), behind))


def _check(text: str) -> MetricCheck:
    try:
        found = _parts(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError):
        found = None
    if found is None:
        return MetricCheck(text, why="it is no comparison of one metric with a number")
    name, function, above, limit = found
    over = f"{function} over steps" if function else "one step"
    over += ", where a clause is about all tokens"
    if name not in (_KL, _RATIO):
        return MetricCheck(text, why=_OTHERS.get(name, _ELSEWHERE))
    if above or function == "min":
        return MetricCheck(text, why="it is no upper limit of the divergence")
    if name == _KL:
        metric, why = "k3_nats", f"the same estimator where reference_policy_kl_type is k3; {over}"
    else:
        if limit <= 1:
            return MetricCheck(text, why="the mean of exp |Δ logp| is never below 1")
        metric, limit = "abs_log_ratio_nats", math.log(limit)
        why = f"mean |Δ logp| ≤ log of the limit, which mean exp |Δ logp| below it implies; {over}"
    return MetricCheck(text, metric, limit, why)


def _parts(tree: ast.expr) -> tuple[str, str, bool, float] | None:
    """The metric, the function over its steps, if any, whether it is to be above, the number."""
    if not isinstance(tree, ast.Compare) or len(tree.ops) != 1:
        return None
    left, operator, right = tree.left, tree.ops[0], tree.comparators[0]
    if not isinstance(operator, ast.Lt | ast.LtE | ast.Gt | ast.GtE):
        return None
    above = isinstance(operator, ast.Gt | ast.GtE)
    limit = _number(right)
    if limit is None:
        left, limit, above = right, _number(left), not above
    if limit is None or not math.isfinite(limit):
        return None
    function = ""
    if isinstance(left, ast.Call) and isinstance(left.func, ast.Name) and left.args:
        function, left = left.func.id, left.args[0]
        if function not in _OVER_STEPS:
            return None
    elif isinstance(left, ast.Subscript):
        left = left.value
    name = _metric(left)
    return None if name is None else (name, function, above, limit)


def _metric(tree: ast.expr) -> str | None:
    """The last part of the name in data["a/name"]."""
    if not isinstance(tree, ast.Subscript) or not isinstance(tree.value, ast.Name):
        return None
    key = tree.slice
    if tree.value.id != "data" or not isinstance(key, ast.Constant):
        return None
    return str(key.value).rpartition("/")[2]


def _number(tree: ast.expr) -> float | None:
    try:
        value = ast.literal_eval(tree)
    except ValueError:
        return None
    return float(value) if isinstance(value, int | float) and value is not True else None


def clauses_of(checks: tuple[MetricCheck, ...], file: str) -> str:
    """The section `statistical` of a contract; of several limits on a metric the smallest.

    Raises:
        ContractError: no check has a clause.
    """
    smallest: dict[str, MetricCheck] = {}
    for check in checks:
        known = smallest.get(check.metric, check)
        if check.metric and check.limit <= known.limit:
            smallest[check.metric] = check
    if not smallest:
        raise ContractError(
            f"none of the {len(checks)} checks of {file} compares the two kernels",
            hint=f"checks of {_KL} and {_RATIO} become clauses",
        )
    lines = [f"statistical:           # from {_flat(file)}"]
    for check in checks:
        if check not in smallest.values():
            why = "another limit is smaller" if check.metric else check.why
            lines.append(f"  # no clause: {check.text} ({why})")
    for metric, check in smallest.items():
        lines += [
            f"  # {check.text}",
            f"  # ({check.why})",
            f"  - {{id: {_IDS[metric]}, metric: {metric}, aggregate: mean, clip: {_CAP:g}, "
            f"at_most: {check.limit:.6g}, slices: all}}",
        ]
    return "\n".join(lines) + "\n"


def _flat(text: str) -> str:
    return " ".join(text.split())
