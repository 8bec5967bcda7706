# Compiles the one C file of the package.  Without a C compiler the package installs all the
# same: exact metrics are then computed by the readable formulas, more than ten times slower.

from __future__ import annotations

import hashlib
import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCE = Path("src/servanda/theory/divergence/row_sums.c")
LIBRARY = SOURCE.with_name("_row_sums.so")
# none of these lets a compiler re-associate a sum or a difference
FLAGS = ("-O3", "-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")


class CompiledMetrics(BuildHookInterface):
    """Adds the compiled library to a wheel, also to one of an editable installation."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        root = Path(self.root)
        digest = hashlib.sha256((root / SOURCE).read_bytes()).hexdigest()
        compiler = shlex.split(os.environ.get("CC") or "cc")
        command = [
            *compiler,
            *FLAGS,
            f'-DSOURCE="{digest}"',
            "-o",
            str(LIBRARY),
            str(SOURCE),
            "-lm",
        ]
        try:
            done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300)
            problem = done.returncode and (
                done.stderr or f"{compiler[0]} ended with {done.returncode}"
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            problem = error
        if problem:
            (root / LIBRARY).unlink(missing_ok=True)
            print(
                f"{SOURCE} is not compiled, its slower formulas are used: {problem}",
                file=sys.stderr,
            )
            return
        build_data["artifacts"].append(str(LIBRARY))
        build_data["pure_python"] = False
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform}"
