# verl: which sequences of a run are judged, from the arguments of its command line.

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from servanda.errors import MeasurementError
from servanda.registry import did_you_mean
from servanda.rl.verl_observer import ASKED, RECOMPUTE, bypassed

_PPO = "verl.trainer.main_ppo"
_MAINS = {  # module that starts a run -> its configuration, in the folder `config` beside it
    _PPO: "ppo_trainer",
    "verl.experimental.one_step_off_policy.main_ppo": "one_step_off_ppo_trainer",
    "verl.experimental.fully_async_policy.fully_async_main": "fully_async_ppo_trainer",
}
_V1 = ("sync", "colocate_async", "separate_async")
_EVERY = (  # arguments for each trainer of verl
    *(["-m", _PPO, f"trainer.v1.trainer_mode={mode}"] for mode in _V1),
    ["-m", _PPO, "trainer.use_v1=False"],
    *(["-m", main] for main in [*_MAINS][1:]),
)


def coverage(arguments: Sequence[str], recompute: float) -> tuple[bool, str]:
    """Whether a run is judged, and what of it.

    Args:
        arguments: of `python -m servanda.rl.verl`; without those of a run, all trainers of verl are
            listed.
        recompute: in bypass mode, the share of sequences that the trainer scores.

    Raises:
        MeasurementError: the module starts none of verl's trainers, or verl's configuration
            refuses an argument.
    """
    parser = ArgumentParser(prog="python -m servanda.rl.verl", allow_abbrev=False)
    parser.add_argument("--check", action="store_true", help="the default")
    parser.add_argument("-m", metavar="MODULE", help=f"as the run gets it: python -m {_PPO}")
    parser.add_argument("--config-name", "-cn", metavar="NAME", help="as the run gets it")
    parser.add_argument("--config-path", "-cp", metavar="DIR", help="as the run gets it")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="as the run gets them")
    asked = parser.parse_intermixed_args(arguments)
    if asked.m or asked.config_name or asked.config_path or asked.overrides:
        trainer, judged, what = _of_run(asked, recompute)
        return judged, f"{trainer}: {what}"
    rows = [_of_run(parser.parse_intermixed_args(words), recompute) for words in _EVERY]
    listed = "\n".join(f"  {trainer:22} {what}" for trainer, _, what in rows)
    return True, (
        f"With verl's own configuration of each trainer:\n{listed}\n"
        "  hint: add the arguments of your run to this command, to see what is judged of it"
    )


def _of_run(asked: Namespace, recompute: float) -> tuple[str, bool, str]:
    """The trainer of a run, whether it is judged, and what of it, or why not."""
    main = asked.m or next(
        (main for main in _MAINS if (_folder(main) / f"{asked.config_name}.yaml").is_file()), _PPO
    )
    config = _composed(main, asked)
    if main != _PPO:
        trainer = main.split(".")[2]
    elif config.trainer.get("use_v1"):
        trainer = f"V1, {_known_mode(config.trainer.v1.trainer_mode)}"
    else:
        trainer = "trainer.use_v1=False"
    if not config.actor_rollout_ref.rollout.get("calculate_log_probs"):
        return trainer, False, f"nothing: its rollout returns no logprobs; set {ASKED}"
    if not bypassed(config):
        return trainer, True, "every batch is judged"
    if not recompute:
        return trainer, False, f"nothing: in bypass mode, with {RECOMPUTE}=0; leave it out"
    return trainer, True, f"{100 * recompute:g} % of the sequences are judged (bypass mode)"


def _known_mode(mode: str) -> str:
    """The mode of a V1 trainer that is registered in verl, by itself or by a plug-in."""
    from verl.trainer.ppo.v1 import get_trainer_cls  # type: ignore[import-not-found]

    try:
        get_trainer_cls(mode)
    except ValueError as error:
        raise MeasurementError(
            f"trainer.v1.trainer_mode={mode}: {error}", hint=did_you_mean(mode, _V1)
        ) from error
    return mode


def _folder(main: str) -> Path:
    spec = find_spec(main) if main in _MAINS else None
    if spec is None or spec.origin is None:
        raise MeasurementError(
            f"-m {main}: it is not known which trainer of verl this module starts",
            hint=did_you_mean(main, _MAINS),
        )
    return Path(spec.origin).parent / "config"


def _composed(main: str, asked: Namespace) -> Any:
    """The configuration of a run, as verl's own module composes it."""
    from hydra import compose, initialize_config_dir  # type: ignore[import-not-found]
    from hydra.errors import HydraException  # type: ignore[import-not-found]

    own = _folder(main).parent
    folder = own / (asked.config_path or "config")
    name = asked.config_name or _MAINS[main]
    # verl's own is relative to a clone of its repository; the last one counts
    search = "hydra.searchpath=[pkg://verl.trainer.config]"
    try:
        with initialize_config_dir(str(folder), version_base=None):
            return compose(name, overrides=[search, *asked.overrides])
    except HydraException as error:
        hint = "give the arguments as verl gets them, such as trainer.use_v1=False"
        if not folder.is_dir():
            hint = f"--config-path is absolute, or relative to {own}"
        elif not (folder / f"{name}.yaml").is_file():
            files = [f for path in {folder, *map(_folder, _MAINS)} for f in path.glob("[!_]*.yaml")]
            hint = did_you_mean(name, {file.stem for file in files})
        raise MeasurementError(
            f"{folder / name}.yaml: {' '.join(str(error).splitlines()[:2])}", hint=hint
        ) from error
