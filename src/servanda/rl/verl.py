# verl: the monitor inside its trainer, enabled by an entry point without configuration.
#
# Every process of verl imports this module (the group `verl.plugins`).  Without SERVANDA_VERL it
# does nothing.  With it, five modules of verl are patched at their first import, so that an error
# is raised in the run, and not suppressed by the plug-in loader:
#
#   verl.utils.debug.metrics              each batch that has both logprobs is observed
#   verl.trainer.ppo.rollout_corr_helper  masks and weights go into what verl writes back
#   verl.trainer.ppo.v1.trainer_base      prompts, staleness, and bypass mode, where verl
#                                         computes no logprobs of its own
#   verl.trainer.ppo.ray_trainer          bypass mode in all other trainers
#   verl.utils.tracking                   a first step that was not judged is an error on stderr
#
#   SERVANDA_VERL            a contract's path, or a preset: verl-sync, verl-async
#   SERVANDA_VERL_STATE      file with one line per step
#   SERVANDA_VERL_DUMP       folder for sampled sequences
#   SERVANDA_VERL_STOP       1: a rule of the contract that says halt ends the run
#   SERVANDA_VERL_RECOMPUTE  in bypass mode, the share of sequences that the trainer scores after
#                            all, 0.06 by default; 0: none
#
# Written for verl 0.9.1.  Axes: B sequences of a batch, T columns of a response.

from __future__ import annotations

import ast
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from typing import Any

from servanda.errors import MeasurementError, ServandaError
from servanda.rl.package_version import check_version
from servanda.rl.verl_observer import ACTIVE, CONTRACT, Watch

_OURS = "__servanda__"  # mark of replaced functions


_PACKAGES = {"transfer_queue": "TransferQueue"}  # module -> its name on PyPI, if different
_SUPPORTED = ((0, 9), (1, 0))
_METRICS = "verl.utils.debug.metrics"
_HELPER = "verl.trainer.ppo.rollout_corr_helper"


# the patched parts of verl


def _metrics(module: Any, watch: Watch) -> None:
    inner = _function(module, "calculate_debug_metrics", "data")

    @wraps(inner)
    def calculate_debug_metrics(data: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {**inner(data, *args, **kwargs), **watch.observe(data)}

    module.calculate_debug_metrics = _marked(calculate_debug_metrics)


def _correction(module: Any, watch: Watch) -> None:
    add_to_batch = _function(module, "compute_rollout_correction_and_add_to_batch", "batch")

    @wraps(add_to_batch)
    def compute(batch: Any, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        batch, metrics = add_to_batch(batch, *args, **kwargs)
        batch = watch.corrected(batch)
        return batch, {**metrics, **watch.of_loss(batch)}

    module.compute_rollout_correction_and_add_to_batch = _marked(compute)


def _trainer(module: Any, watch: Watch) -> None:
    inner = _function(module, "PPOTrainer._compute_old_log_prob", "self", "batch", "metrics")

    @wraps(inner)
    def _compute_old_log_prob(
        self: Any, batch: Any, metrics: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        with watch.working_on(self, batch):
            logprobs = inner(self, batch, metrics, *args, **kwargs)
            if ACTIVE not in metrics:
                metrics.update(watch.of_bypass(self, batch))
        return logprobs

    module.PPOTrainer._compute_old_log_prob = _marked(_compute_old_log_prob)
    # it has imported these by name, perhaps before they were patched
    metrics, helper = import_module(_METRICS), import_module(_HELPER)
    module.calculate_debug_metrics = metrics.calculate_debug_metrics
    module.compute_rollout_correction_and_add_to_batch = (
        helper.compute_rollout_correction_and_add_to_batch
    )


def _updates(module: Any, watch: Watch) -> None:
    inner = _function(module, "RayPPOTrainer._update_actor", "self", "batch")
    score = _function(module, "RayPPOTrainer._compute_old_log_prob", "self", "batch")

    @wraps(inner)
    def _update_actor(self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        metrics = watch.of_update(self, batch, score)
        updated = inner(self, batch, *args, **kwargs)
        updated.meta_info["metrics"].update(metrics)
        return updated

    module.RayPPOTrainer._update_actor = _marked(_update_actor)


def _tracking(module: Any, watch: Watch) -> None:
    inner = _function(module, "Tracking.log", "self", "data", "step")

    @wraps(inner)
    def log(self: Any, data: Any, step: Any, *args: Any, **kwargs: Any) -> None:
        inner(self, data, step, *args, **kwargs)
        watch.of_log(data, step)

    module.Tracking.log = _marked(log)


CHANGES: Mapping[str, Callable[[Any, Watch], None]] = {
    _METRICS: _metrics,
    _HELPER: _correction,
    "verl.trainer.ppo.v1.trainer_base": _trainer,
    "verl.trainer.ppo.ray_trainer": _updates,
    "verl.utils.tracking": _tracking,
}


def _function(module: Any, name: str, *takes: str) -> Any:
    """A function of verl, after a check of its arguments.

    Raises:
        MeasurementError: this verl has different arguments, or lacks the function.
    """
    try:
        function = attrgetter(name)(module)
    except AttributeError:
        what = "is not there"
    else:
        has = [*inspect.signature(function).parameters]
        if has[: len(takes)] == [*takes]:
            return function
        what = f"takes ({', '.join(has)})"
    raise MeasurementError(
        f"{module.__name__}.{name} of verl {what}, and not ({', '.join(takes)}): the run would go "
        "unwatched",
        hint=f"this is written against verl 0.9.1; without {CONTRACT} the run begins",
    )


def check_verl() -> None:
    """Refuse an unsupported version of verl."""
    check_version("verl", "verl", _SUPPORTED, "0.9.1")


def _marked(function: Any) -> Any:
    setattr(function, _OURS, True)
    return function


class _Changing(MetaPathFinder):
    """Patches a module of verl right after its first execution."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name not in CHANGES:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            check_verl()
            CHANGES[name](module, self.watch)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def install(monitor: Any = None, recompute: float | None = None) -> Watch:
    """Install the monitor in the verl of this process; done at import if SERVANDA_VERL is set.

    Args:
        monitor: default: from the environment variables.
        recompute: in bypass mode, the share of sequences that the trainer still scores; default:
            from the environment, or 0.06.
    """
    for finder in sys.meta_path:
        if isinstance(finder, _Changing):
            return finder.watch
    watch = Watch(monitor, recompute)
    sys.meta_path.insert(0, _Changing(watch))
    for name, change in CHANGES.items():
        if name in sys.modules:
            check_verl()
            change(sys.modules[name], watch)
    return watch


def missing() -> list[str]:
    """The reasons why the monitor would not see a run of verl in this environment; [] if none.

    A launcher can assert it; `python -m servanda.rl.verl --check` prints it and exits with 2.
    """
    if not os.environ.get(CONTRACT):
        return [f"{CONTRACT} is not set: name a contract, or a preset such as verl-sync"]
    if find_spec("verl") is None:
        return [f"verl is not installed for {sys.executable}: pip install verl==0.9.1"]
    try:
        check_verl()
    except MeasurementError as error:
        return [str(error)]
    problems = []
    try:
        watch = Watch()
        _ = watch.monitor, watch.recompute
    except ServandaError as error:
        problems.append(str(error))
    lacking = absent()
    if lacking:
        packages = " ".join(_PACKAGES.get(name, name) for name in lacking)
        problems.append(
            f"verl imports {', '.join(lacking)}, not installed here: pip install {packages}"
        )
    for name in CHANGES:
        try:
            module = import_module(name)
        except (ImportError, ServandaError) as error:
            if (getattr(error, "name", None) or "").partition(".")[0] not in lacking:
                problems.append(f"{name} cannot be imported: {error}")
            continue
        if not any(hasattr(value, _OURS) for value in _functions(module)):
            problems.append(
                f"{name} is not watched: is servanda installed in this environment, and does "
                "VERL_USE_EXTERNAL_PLUGINS leave it out?"
            )
    return problems


def absent() -> list[str]:
    """Missing packages that the watched modules of verl import when they load.

    Parsed from the source of verl, because a failing import reports only one at a time.
    """
    verl = find_spec("verl")
    if verl is None or not verl.submodule_search_locations:
        return []
    root = Path(next(iter(verl.submodule_search_locations)))
    lacking: dict[str, None] = {}
    read: set[str] = set()
    left = [*CHANGES]
    while left:
        name = left.pop()
        parts = name.split(".")
        if parts[0] != "verl":
            lacking |= {} if find_spec(parts[0]) else {parts[0]: None}
            continue
        # parent packages are imported before a module
        for end in range(1, len(parts) + 1):
            if (own := ".".join(parts[:end])) in read:
                continue
            read.add(own)
            path = root.joinpath(*parts[1:end])
            file = next(filter(Path.is_file, (path / "__init__.py", path.with_suffix(".py"))), None)
            if file is not None:
                text = file.read_text(encoding="utf-8")
                left += _imports(text, own if file.stem == "__init__" else own.rpartition(".")[0])
    return [*lacking]


def _imports(text: str, package: str) -> list[str]:
    """The unconditional imports of a module: not in a function, and not in a `try`."""
    names = []
    for node in ast.parse(text).body:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) + 1 - node.level]
            base = ".".join([*(above if node.level else []), *filter(None, [node.module])])
            names += [base, *(f"{base}.{alias.name}" for alias in node.names)]
    return names


def _functions(module: Any) -> list[Any]:
    classes = [value for value in vars(module).values() if isinstance(value, type)]
    own = [vars(value) for value in classes if value.__module__ == module.__name__]
    return [value for names in (vars(module), *own) for value in names.values()]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what is missing, or what will be judged of the run that has these arguments.

    Returns:
        2 if something is missing, or if that run is not judged; else 0.
    """
    from servanda.rl.verl_coverage import coverage

    if problems := missing():
        print("\n".join(problems))
        return 2
    try:
        judged, text = coverage(sys.argv[1:] if arguments is None else arguments, Watch().recompute)
    except ServandaError as error:
        judged, text = False, str(error)
    print(f"verl is watched: {os.environ[CONTRACT]}\n{text}" if judged else text)
    return 0 if judged else 2


if __name__ == "__main__":
    sys.exit(main())  # not installed here: the question is whether verl installs it
if os.environ.get(CONTRACT):
    install()
