# What of a run of verl is judged, by its arguments; tests/real_rl/test_verl.py has verl's own
# configurations.

import json
import sys

import pytest

from servanda.rl import verl as plugin
from servanda.rl.verl_observer import CONTRACT, RECOMPUTE
from tests.rl.test_verl import STAND_IN, verl  # noqa: F401 - a fixture

HYDRA = {
    "hydra/errors.py": "class HydraException(Exception): ...\n",
    "hydra/__init__.py": """\
import contextlib, json
from hydra.errors import HydraException

folders = []

class Node(dict):
    __getattr__ = dict.__getitem__

@contextlib.contextmanager
def initialize_config_dir(folder, version_base):
    folders.append(folder)
    yield

def compose(name, overrides):
    try:
        with open(f"{folders[-1]}/{name}.yaml") as file:
            values = json.load(file)
    except FileNotFoundError as error:
        raise HydraException("Cannot find primary config") from error
    root = Node()
    for text in overrides:
        key, _, value = text.partition("=")
        if key not in {*values, "hydra.searchpath"}:
            raise HydraException(f"Could not override '{key}'.\\nTo append use +{text}\\nSee hydra")
        values[key] = {"True": True, "False": False}.get(value, value)
    for key, value in values.items():
        node = root
        *above, last = key.split(".")
        for part in above:
            node = node.setdefault(part, Node())
        node[last] = value
    return root
""",
}
MODES = """\
def get_trainer_cls(name):
    if name not in ("sync", "colocate_async", "separate_async", "ours"):
        raise ValueError(f"Unknown trainer '{name}'. Available trainers: ours, sync.")
"""
CONFIG = {
    "trainer.use_v1": True,
    "trainer.v1.trainer_mode": "sync",
    "algorithm.rollout_correction.bypass_mode": False,
    "actor_rollout_ref.rollout.calculate_log_probs": True,
}
BYPASS = {"algorithm.rollout_correction.bypass_mode": True}
ONE_STEP = "verl.experimental.one_step_off_policy.main_ppo"
FULLY = "verl.experimental.fully_async_policy.fully_async_main"
MAINS = {  # module -> (its configuration, values)
    "verl.trainer.main_ppo": ("ppo_trainer", {}),
    ONE_STEP: ("one_step_off_ppo_trainer", BYPASS),
    FULLY: ("fully_async_ppo_trainer", BYPASS),
}


@pytest.fixture
def check(verl, tmp_path, monkeypatch, capsys):  # noqa: F811
    """Runs the command on the arguments of a run: (exit code, printed text)."""
    monkeypatch.setenv(CONTRACT, "verl-sync")
    monkeypatch.delenv(RECOMPUTE, raising=False)
    site = tmp_path / "site"
    files = {**HYDRA, "verl/trainer/ppo/v1/__init__.py": MODES}
    for main, (name, values) in MAINS.items():
        path = main.replace(".", "/")
        for folder in ("verl/experimental", path.rpartition("/")[0]):
            files.setdefault(f"{folder}/__init__.py", STAND_IN.get(f"{folder}/__init__.py", ""))
        files[f"{path}.py"] = ""
        files[f"{path.rpartition('/')[0]}/config/{name}.yaml"] = json.dumps({**CONFIG, **values})
    for name, text in files.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text)
    plugin.install()

    def run(*arguments):
        code = plugin.main(["--check", *arguments])
        return code, capsys.readouterr().out

    yield run
    for name in [n for n in sys.modules if n.split(".")[0] == "hydra"]:
        del sys.modules[name]


def test_without_a_run_every_trainer_of_verl_is_listed(check):
    assert check() == (
        0,
        "verl is watched: verl-sync\n"
        "With verl's own configuration of each trainer:\n"
        "  V1, sync               every batch is judged\n"
        "  V1, colocate_async     every batch is judged\n"
        "  V1, separate_async     every batch is judged\n"
        "  trainer.use_v1=False   every batch is judged\n"
        "  one_step_off_policy    6 % of the sequences are judged (bypass mode)\n"
        "  fully_async_policy     6 % of the sequences are judged (bypass mode)\n"
        "  hint: add the arguments of your run to this command, to see what is judged of it\n",
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["trainer.v1.trainer_mode=ours"], "V1, ours: every batch is judged"),
        (
            ["trainer.use_v1=False", "algorithm.rollout_correction.bypass_mode=True"],
            "trainer.use_v1=False: 6 % of the sequences are judged (bypass mode)",
        ),
        (["-m", FULLY], "fully_async_policy: 6 % of the sequences are judged (bypass mode)"),
        (
            ["trainer.use_v1=True", "--config-name", "one_step_off_ppo_trainer"],
            "one_step_off_policy: 6 % of the sequences are judged (bypass mode)",
        ),
        (
            ["algorithm.rollout_correction.bypass_mode=False", "-m", ONE_STEP],
            "one_step_off_policy: every batch is judged",
        ),
    ],
)
def test_a_run_is_told_what_of_it_is_judged(check, arguments, said):
    assert check(*arguments) == (0, f"verl is watched: verl-sync\n{said}\n")


def test_a_configuration_of_ones_own_is_read_where_the_run_reads_it(check, tmp_path):
    values = {**CONFIG, "trainer.v1.trainer_mode": "separate_async"}
    (tmp_path / "mine.yaml").write_text(json.dumps(values))
    code, said = check("--config-path", str(tmp_path), "--config-name=mine")
    assert (code, said.splitlines()[-1]) == (0, "V1, separate_async: every batch is judged")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["actor_rollout_ref.rollout.calculate_log_probs=False", "trainer.use_v1=False"],
            "trainer.use_v1=False: nothing: its rollout returns no logprobs; set "
            "actor_rollout_ref.rollout.calculate_log_probs=True\n",
        ),
        (
            ["-m", FULLY],
            "fully_async_policy: nothing: in bypass mode, with SERVANDA_VERL_RECOMPUTE=0; leave it "
            "out\n",
        ),
        (
            ["-m", "verl.trainer.main_pp"],
            "-m verl.trainer.main_pp: it is not known which trainer of verl this module starts\n"
            "  hint: did you mean 'verl.trainer.main_ppo'?\n",
        ),
        (
            ["trainer.v1.trainer_mode=separate"],
            "trainer.v1.trainer_mode=separate: Unknown trainer 'separate'. Available trainers: "
            "ours, sync.\n  hint: did you mean 'separate_async'?\n",
        ),
        (
            ["-cn", "fully_async_trainer"],
            "{}/verl/trainer/config/fully_async_trainer.yaml: Cannot find primary config\n"
            "  hint: did you mean 'fully_async_ppo_trainer'?\n",
        ),
        (
            ["-cp", "/nowhere"],
            "/nowhere/ppo_trainer.yaml: Cannot find primary config\n"
            "  hint: --config-path is absolute, or relative to {}/verl/trainer\n",
        ),
        (
            ["trainer.usev1=False"],
            "{}/verl/trainer/config/ppo_trainer.yaml: Could not override 'trainer.usev1'. To "
            "append use +trainer.usev1=False\n"
            "  hint: give the arguments as verl gets them, such as trainer.use_v1=False\n",
        ),
    ],
)
def test_a_run_that_is_not_judged_or_not_known_exits_with_2(
    check, tmp_path, monkeypatch, arguments, said
):
    monkeypatch.setenv(RECOMPUTE, "0")
    assert check(*arguments) == (2, said.format(tmp_path / "site"))


def test_an_argument_that_is_neither_verls_nor_ours_is_refused(check, capsys):
    with pytest.raises(SystemExit) as caught:
        check("--confg-name", "ppo_trainer")
    assert caught.value.code == 2
    assert capsys.readouterr().err.endswith("error: unrecognized arguments: --confg-name\n")


def test_what_is_missing_comes_before_what_would_be_judged(check, monkeypatch):
    monkeypatch.delenv(CONTRACT)
    assert check("trainer.use_v1=False") == (
        2,
        "SERVANDA_VERL is not set: name a contract, or a preset such as verl-sync\n",
    )
