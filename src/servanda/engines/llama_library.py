# The library of llama.cpp, by the low-level bindings of llama-cpp-python.

from __future__ import annotations

import importlib
import os
import sys
from collections import deque
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from servanda.errors import MeasurementError

_PLACE = "LLAMA_CPP_LIB_PATH"  # read by llama-cpp-python when it is imported
_ERROR, _CONTINUED = 4, 5  # levels of ggml's log

_said: deque[str] = deque(maxlen=20)
_kept = SimpleNamespace(callback=None, level=0)


@cache
def llama() -> Any:
    """The bindings, `llama_cpp.llama_cpp`, with the library loaded and its chatter off.

    The library is looked for where LLAMA_CPP_LIB_PATH says, or else in `llama.cpp/bin` of the
    virtual environment, or else in llama-cpp-python itself.

    Raises:
        MeasurementError: it is not installed, or its library cannot be loaded.
    """
    own = Path(sys.prefix) / "llama.cpp" / "bin"
    if _PLACE not in os.environ and any(own.glob("libllama.*")):
        os.environ[_PLACE] = str(own)
    try:
        bindings = importlib.import_module("llama_cpp.llama_cpp")
    except ImportError as error:
        raise MeasurementError(
            f"engine 'llamacpp' cannot import llama-cpp-python: {error}",
            hint="pip install 'servanda[llamacpp]' into the environment that runs it, and name "
            "it as kernels.*.python",
        ) from error
    except (OSError, RuntimeError) as error:
        place = os.environ.get(_PLACE)
        raise MeasurementError(
            f"the library of llama.cpp cannot be loaded: {error}"
            + (f" ({_PLACE} is {place!r})" if place else ""),
            hint=f"let {_PLACE} name the folder of libllama, or install llama-cpp-python with its "
            "library: pip install --no-binary llama-cpp-python llama-cpp-python",
        ) from error
    _kept.callback = bindings.llama_log_callback(_heard)
    bindings.llama_log_set(_kept.callback, None)
    bindings.llama_backend_init()
    return bindings


def _heard(level: int, text: bytes, _data: Any) -> None:
    """Errors are kept for messages and printed; the rest is how llama.cpp thinks aloud."""
    _kept.level = _kept.level if level == _CONTINUED else level
    if _kept.level == _ERROR:
        words = text.decode(errors="replace")
        _said.append(words.strip())
        print(words, end="", file=sys.stderr, flush=True)


def last_error() -> str:
    """What llama.cpp said first of what went wrong last; forgotten once it is told."""
    said = next((line for line in _said if line), "it does not say why")
    _said.clear()
    return said
