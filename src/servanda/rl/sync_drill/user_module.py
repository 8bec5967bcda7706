# FILE.py:NAME: the trainer that a user's file defines for the test.

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from servanda.errors import ContractError, ServandaError, Where
from servanda.registry import did_you_mean

T = TypeVar("T")


def opened(target: str) -> Any:
    """The object `FILE.py:NAME`; a function is called without arguments.

    Raises:
        ContractError: no such file or name, or the file's code raises; with its place.
    """
    file, colon, name = target.rpartition(":")
    if not colon or not file or not name.isidentifier():
        raise ContractError(
            f"{target!r} does not name a trainer",
            hint="write FILE.py:NAME, such as setup.py:trainee; for a training script of TRL: "
            "servanda preflight --trl FILE.py",
        )
    path = Path(file)
    if not path.is_file():
        raise ContractError(f"there is no file {file}", hint="the part before the ':' is a path")
    module = ModuleType(f"servanda_drilled_{path.stem}")
    module.__file__ = str(path)
    sys.path.insert(0, str(path.parent.resolve()))
    # dataclasses and pickles look a class's module up by its name
    sys.modules[module.__name__] = module
    source = path.read_text(encoding="utf-8")
    called(path, lambda: exec(compile(source, str(path), "exec"), vars(module)))
    if name not in vars(module):
        known = [n for n in vars(module) if not n.startswith("_")]
        raise ContractError(f"{file} has no {name!r}", hint=did_you_mean(name, known))
    target_object = vars(module)[name]
    # a Trainee has `sync`, a trainer or a module `train`; otherwise it is a factory
    made = hasattr(target_object, "sync") or hasattr(target_object, "train")
    return called(path, target_object) if callable(target_object) and not made else target_object


def called(path: Path, call: Callable[[], T]) -> T:
    """Call code of a user's file; its exceptions become an error of the call.

    Raises:
        ContractError: with the last line of the file that was reached.
        ServandaError: unchanged.
    """
    try:
        return call()
    except ServandaError:
        raise
    except SyntaxError as error:
        where = Where(str(path), error.lineno or 1, error.offset or 1, (error.text or "").rstrip())
        raise ContractError(f"{type(error).__name__}: {error.msg}", where=where) from error
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [f for f in frames if f.filename == str(path)]
        where = None
        if lines and lines[-1].lineno:
            text = path.read_text(encoding="utf-8").splitlines()[lines[-1].lineno - 1]
            column = len(text) - len(text.lstrip()) + 1
            where = Where(str(path), lines[-1].lineno, column, text)
        raise ContractError(
            f"{type(error).__name__}: {error}",
            where=where,
            hint="the error is in this file; no weight was changed",
        ) from error
