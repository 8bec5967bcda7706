# Scoring: the reward of a response, by a built-in rule or the contract's own function.
#
# The contract's own function is compiled from the text in the evidence key, so evidence of another
# version of the file expires.  Its output goes to stderr: stdout is for the report.

from __future__ import annotations

import ast
import contextlib
import math
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from numbers import Real
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from servanda.contract.identity import digest_of
from servanda.engines.foreign_code import refuse_code
from servanda.errors import MeasurementError, Where
from servanda.judgement.rewards import REWARDS, file_and_function
from servanda.registry import did_you_mean
from servanda.traces.corpus import Corpus

if TYPE_CHECKING:
    from servanda.judgement.plan import Plan

_SHOWN = 60  # most characters of a response in a message


@dataclass(frozen=True)
class Scorer:
    """The reward of a contract, with a check of its range.

    Args:
        of: its name in the contract.
        span: smallest and largest reward.
        file: file of the function; "" for a built-in rule.
    """

    of: str
    score: Callable[[dict[str, Any], str], Any]
    span: tuple[float, float]
    file: str = ""
    # both kernels' threads score, but the contract's function may assume a single thread
    _one: threading.Lock = field(default_factory=threading.Lock, compare=False)

    def __call__(self, corpus: Corpus, row: int, answer: str, side: str) -> float:
        """The reward of a side's response to a line.

        Raises:
            MeasurementError: the function raised, or returned no number within the range.
        """
        line = f"{corpus.file}:{corpus.prompts[row].line}"
        answer_text = f"{side}'s answer {_short(answer)} to {line}"
        try:
            with self._one, contextlib.redirect_stdout(sys.stderr):
                value = self.score(corpus.given(row), answer)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # exit(0) in it would mean "holds"
            raise MeasurementError(
                f"the reward {self.of} failed on {answer_text}: {_error_text(error)}",
                where=_place(error, self.file),
                hint="correct the function; evidence that was measured with its old text expires",
            ) from error
        if not isinstance(value, Real | np.bool_) or math.isnan(value):
            raise MeasurementError(
                f"the reward {self.of} of {answer_text} is {_short(value)}, and a number is wanted",
                hint="return a number for every answer: 0 for a wrong one",
            )
        low, high = self.span
        if not low <= (reward := float(value)) <= high:
            raise MeasurementError(
                f"the reward {self.of} of {answer_text} is {reward:g}, outside of the declared "
                f"range {low:g} to {high:g}",
                hint="declare the range that the reward has under reward.range",
            )
        return reward


def scorer_of(plan: Plan) -> Scorer | None:
    """The scorer of a plan's responses; None if no clause uses rewards.

    Raises:
        MeasurementError: the contract's own function cannot be loaded.
    """
    reward = plan.contract.reward
    if not plan.reward or reward is None or reward.of is None:
        return None
    parts = file_and_function(reward.of)
    if parts is None:
        return Scorer(reward.of, REWARDS[reward.of].score, reward.range)
    file, function = parts
    refuse_code(plan.contract)
    return Scorer(reward.of, _loaded(file, function, plan.reward_source), reward.range, file)


def _loaded(file: str, function: str, source: str) -> Callable[[dict[str, Any], str], Any]:
    """The function of a Python file, compiled from the text that was read."""
    module = ModuleType(f"servanda_reward_{digest_of(source)}")
    module.__file__ = file
    sys.modules[module.__name__] = module  # for dataclasses, which look up the module of a class
    try:
        with contextlib.redirect_stdout(sys.stderr):
            exec(compile(source, file, "exec", dont_inherit=True), module.__dict__)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise MeasurementError(
            f"the reward's file cannot be run: {_error_text(error)}",
            where=_place(error, file),
            hint="it runs in isolation: it can import installed packages, and no file next to it",
        ) from error
    scorer = getattr(module, function, None)
    if not callable(scorer):
        tree = ast.parse(source)
        known = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
        raise MeasurementError(
            f"{file} has no function {function!r}",
            hint=did_you_mean(function, known) if known else f"define {function}(prompt, answer)",
        )
    return scorer


def _error_text(error: BaseException) -> str:
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    return f"{type(error).__name__}: {text}".rstrip(": ")


def _place(error: BaseException, file: str) -> Where | None:
    """The last line of a file in an error's traceback."""
    if isinstance(error, SyntaxError) and error.filename == file:
        return Where(file, error.lineno or 1, error.offset or 1, (error.text or "").rstrip())
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == file]
    if not frames or not file:
        return None
    return Where(file, frames[-1].lineno or 1, 1, frames[-1].line or "")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
