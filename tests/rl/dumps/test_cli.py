# `servanda check DIR` and `servanda check DIR`: output, files and exit codes.

import json
import re
from pathlib import Path

import pytest

from tests.kit import servanda
from tests.rl.dumps import made
from tests.rl.dumps.formats import made as trainers


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    return made.write(tmp_path_factory.mktemp("healthy"))


EXAMPLE = Path(__file__).parents[3] / "examples" / "tiny-bf16.kernelcontract.yaml"


@pytest.fixture(scope="module")
def bad(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bad")
    return made.write(folder, n=32, turns=4, tv=lambda *at: made.bad_starts(*at, since=4))


def body(done):
    """Without the last line, which has the seconds."""
    return done.stdout.rstrip("\n").split("\n")[:-1]


def test_reports_are_written_and_named(healthy, tmp_path):
    page, data = tmp_path / "r.html", tmp_path / "r.json"
    done = servanda("check", healthy, "--quiet", "--report", page, "--report", data)

    assert done.exit_code == 0
    assert f"report   {page}" in done.stdout
    verdict = json.loads(data.read_text())
    assert (verdict["outcome"], verdict["exit_code"]) == ("holds", 0)
    assert verdict["key"]["grade"] == "declared" and verdict["key"]["weights"] == "1..12"
    assert "rollout engine" in page.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["json", "junit", "sarif", "github", "markdown", "html"])
def test_every_format_takes_the_verdict_of_a_dump(bad, name):
    done = servanda("check", bad, "--quiet", "--format", name)
    assert done.exit_code == 1 and done.stdout
    assert name != "json" or json.loads(done.stdout)["outcome"] == "violated"


def test_the_saved_contract_lints(healthy, tmp_path):
    saved = tmp_path / "rollout.kernelcontract.yaml"
    assert servanda("check", healthy, "--quiet", "--save-contract", saved).exit_code == 0
    assert servanda("contract", "lint", saved).exit_code == 0
    again = servanda("check", healthy, "--quiet", "--save-contract", saved)
    assert again.exit_code == 2 and "is there already" in again.output


def test_masks_are_written_where_asked(bad, tmp_path):
    done = servanda("check", bad, "--quiet", "--mask", tmp_path / "m")
    assert f"masks    2,304 tokens in {tmp_path / 'm'}/step_*.npz" in done.stdout
    assert len([*(tmp_path / "m").iterdir()]) == 12


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "a"], "'a' is not a range of steps: write 10:20, 10:, :20 or 10"),
        (["--steps", "9:3"], "'9:3' ends before it begins: write 3:9"),
        (["--preset", "nemo"], "a dump needs a preset for a trainer, and 'nemo' does not exist"),
        (["--as", "nemoo"], "there is no dump format 'nemoo'"),
        (
            ["--fresh"],
            "a dump was measured already, so that this is for a contract: leave out --fresh",
        ),
    ],
)
def test_a_wrong_call_is_exit_2(healthy, arguments, message):
    done = servanda("check", healthy, *arguments)
    assert done.exit_code == 2
    assert message in done.output


def test_a_file_that_is_no_dump_or_was_not_finished_is_said(tmp_path):
    other = tmp_path / "metrics.jsonl"
    other.write_text("{}\n")
    done = servanda("check", other, "--quiet")
    assert done.exit_code == 2
    assert f"'{other}' is no file of a dump; looked for train_data_step<N>.jsonl" in done.stderr
    many = trainers.sequences(60, longest=60)
    trainers.prime(tmp_path, many, step=1)
    trainers.prime(tmp_path, many, step=2, stable=False)
    done = servanda("check", tmp_path, "--quiet")
    assert "steps without STABLE, left out: 2" in done.stdout


def test_the_preset_and_the_one_step_of_check_are_those_of_a_dump(healthy):
    done = servanda("check", healthy, "--preset", "trl", "--quiet", "--steps", "5")
    assert "preset   trl, as asked" in done.stdout and "· step 5 ·" in done.stdout
    last = done.stdout.rstrip("\n").split("\n")[-1]
    assert re.fullmatch(r"exit \d · \d+ s · [\d,.]+( M)? tokens/s", last)

    done = servanda("check", EXAMPLE, "--preset", "trl")
    assert done.exit_code == 2
    assert f"{EXAMPLE} is a contract, and this is for a dump: leave out --preset" in done.output


# --contract: limits and slices of one's own


@pytest.fixture
def saved(healthy, tmp_path):
    path = tmp_path / "gate.kernelcontract.yaml"
    assert servanda("check", healthy, "--quiet", "--save-contract", path).exit_code == 0
    return path


@pytest.mark.slow
def test_the_contract_of_a_green_dump_judges_it_and_the_next_one(healthy, bad, saved):
    again = servanda("check", healthy, "--quiet", "--contract", saved)

    assert again.exit_code == 0 and f"contract {saved}, as asked" in again.stdout
    assert "preset" not in again.stdout and "--save-contract" not in again.stdout
    verdict = [
        json.loads(servanda("check", healthy, *words, "--quiet", "--format", "json").stdout)
        for words in ((), ("--contract", saved))
    ]
    numbers = [[(c["slice"], c["outcome"], c["value"]) for c in v["cells"]] for v in verdict]
    assert numbers[0] == numbers[1]  # the slices of the preset are those that the contract names
    assert servanda("check", bad, "--quiet", "--contract", saved).exit_code == 1
    next_one = servanda("check", EXAMPLE.parent / "tiny-dump", "--contract", saved)
    assert f"--contract {saved} --steps 16    (this step alone)" in next_one.stdout


def test_its_limits_are_those_that_count(healthy, saved):
    saved.write_text(saved.read_text().replace("at_most: 0.025", "at_most: 0.001"))

    done = servanda("check", healthy, "--quiet", "--contract", saved)

    assert done.exit_code == 1 and "0.001" in done.stdout


def test_a_slice_that_the_dump_does_not_have_is_inconclusive(healthy, saved):
    text = saved.read_text().replace(
        "slices:\n", 'slices:\n  - {name: web, match: {labels.env: {in: ["web"]}}}\n', 1
    )
    saved.write_text(re.sub(r"slices: \[all, ", "slices: [web, all, ", text, count=1))

    done = servanda("check", healthy, "--quiet", "--contract", saved, "--format", "json")

    cells = {c["slice"]: c["outcome"] for c in json.loads(done.stdout)["cells"]}
    assert done.exit_code == 3 and cells["web"] == "inconclusive" and cells["all"] == "holds"


@pytest.mark.slow
def test_a_split_of_a_label_has_the_slices_of_the_dump(bad, saved):
    text = saved.read_text().replace(
        "slices:\n", "slices:\n  - {name: env, split: labels.env}\n", 1
    )
    saved.write_text(re.sub(r"slices: \[all, ", "slices: [env, all, ", text, count=1))
    dump = EXAMPLE.parent / "tiny-dump"

    assert "env=search, env=shell" in servanda("check", dump, "--contract", saved).stdout
    assert servanda("watch", dump, "--once", "--contract", saved).exit_code == 1
    none = servanda("check", bad, "--contract", saved)
    assert none.exit_code == 2 and "splits by label 'env', which no line of" in none.output


def test_a_contract_for_kernels_is_refused_for_a_dump(healthy):
    done = servanda("check", healthy, "--contract", EXAMPLE)
    assert done.exit_code == 2
    assert done.output.endswith(
        f"{EXAMPLE} is no contract for a trainer's steps, which has external kernels and a "
        "realised claim\n  hint: servanda check DUMP --save-contract FILE writes one\n"
    )


@pytest.mark.parametrize("words", [["--preset", "trl"], ["--bitwise"], ["--save-contract", "x"]])
def test_a_contract_and_what_it_says_itself_are_not_both_given(healthy, saved, words):
    done = servanda("check", healthy, "--contract", saved, *words)
    assert done.exit_code == 2
    assert (
        "--contract sets the limits, the slices and whether the bits are the same: leave out "
        f"{words[0]}" in done.output
    )


def test_a_contract_of_a_trainer_cannot_be_measured_and_says_what_to_do(saved):
    done = servanda("check", saved)
    assert done.exit_code == 2 and "servanda check DUMP --contract FILE" in done.output


def test_the_help_lists_the_options_of_a_contract_and_of_a_dump_apart():
    text = servanda("check", "--help").output
    contract, dump = (text.index(f"Options for a {what}:\n") for what in ("contract", "dump"))
    assert contract < text.index("--run-dir") < dump < text.index("--steps")
    for word in ("dump", "rollouts", "trainer", "engine"):
        assert word in text


def test_a_run_directory_is_no_dump(tmp_path):
    (tmp_path / "attempt-1").mkdir()
    done = servanda("check", tmp_path)
    assert done.exit_code == 2
    assert done.output == (
        f"{tmp_path} is a run directory of servanda, not a trainer's dump\n"
        f"  hint: print its verdict: servanda tools report {tmp_path}\n"
    )


def test_a_dump_of_nemo_rl_is_held_to_its_own_preset(tmp_path):
    import numpy as np

    rng = np.random.default_rng(1)
    for step in range(1, 4):
        r = made.rollouts(rng, step, 32)
        lines = []
        for s in range(len(r)):
            at = slice(int(r.start_S[s]), int(r.start_S[s] + r.length_S[s]))
            columns = {
                "token_ids": r.token_N[at],
                "token_loss_mask": r.mask_N[at].astype(float),
                "generation_logprobs": np.nan_to_num(r.logp_infer_N[at]),
                "prev_logprobs": np.nan_to_num(r.logp_train_N[at], nan=-1.0),
                "advantages": np.zeros(at.stop - at.start),
            }
            row = {name: [column.tolist()] for name, column in columns.items()}
            row |= {"input_lengths": [int(r.length_S[s])], "rewards": [0.0], "idx": s}
            row |= {"sample_loss_mask": [1.0], "content": ["x"]}
            lines.append(json.dumps(row))
        (tmp_path / f"train_data_step{step}.jsonl").write_text("\n".join(lines) + "\n")

    done = servanda("check", tmp_path, "--quiet")

    assert done.exit_code == 0, done.output
    assert "3 files of NeMo-RL · steps 1 to 3 · 96 sequences" in done.stdout
    assert "preset   nemo-grpo, as the format suggests" in done.stdout


def test_check_takes_a_file_of_a_dump_as_well(bad):
    done = servanda("check", bad / "step_000004.rank0.parquet", "--quiet")
    assert done.exit_code in (1, 3)
    assert "found    1 file of Servanda · step 4" in done.stdout


@pytest.mark.parametrize("name", ["json", "junit", "sarif", "github", "markdown", "html"])
def test_every_format_takes_data_that_is_not_sound(name, tmp_path):
    many = trainers.sequences(60, longest=60)
    trainers.nemo(tmp_path, many, step=1)
    trainers.nemo(tmp_path, many, step=2, prev_logprobs=[[0.0]])
    done = servanda("check", tmp_path, "--quiet", "--format", name)
    assert done.exit_code == 4
    if name in ("github", "markdown", "html"):
        assert "The data cannot be trusted." in done.stdout and "rejected" in done.stdout


def test_a_report_speaks_of_going_on_and_since_when(bad, healthy):
    said = servanda("check", bad, "--quiet", "--format", "html").stdout
    assert "Do not go on as it is." in said and "since step 4" in said
    assert "promote" not in said and "of the prompts" not in said
    assert "✓ Go on." in servanda("check", healthy, "--quiet", "--format", "markdown").stdout
