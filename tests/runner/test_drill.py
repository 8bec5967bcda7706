# A fault injected into a contract's kernels, by the function and by `servanda demo --fault`.

import os
import subprocess
import sys

import pytest
from click.testing import CliRunner

from servanda.cli.demo import averages
from servanda.cli.main import main
from servanda.engines.faults import FAULTS
from servanda.engines.worker import kept
from servanda.errors import IdentityError, MeasurementError
from servanda.judgement.token_profile import Gate
from servanda.judgement.verdict import FORMATS
from servanda.runner import run
from servanda.runner.fault_drill import drill
from tests import kit
from tests.report import made

SIZES = {"first": 64, "last": 640, "limit": 0.1, "q": {"": kit.BASE}}


def injected_by_hand(tmp_path, text):
    """The verdict where the contract itself says the fault."""
    path, _ = kit.write(tmp_path / "by hand", infer=f", fault: {text}", **SIZES)
    return run.check(path, run_dir=tmp_path / "run", open=run.in_process)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("name", "value", "outcome", "deciding"),
    [
        ("undisclosed_temperature", 0.3, "violated", ("sampler_fidelity on all",)),
        ("lost_sequences", 0.9, "error", ("usable_ratio on all",)),
        ("off_by_one_shift", 1, "violated", ("sampler_fidelity on all",)),  # the ends repeat
        ("lost_top_token", 1e-6, "holds", ()),
    ],
)
def test_a_drill_ends_as_a_contract_with_that_fault(tmp_path, name, value, outcome, deciding):
    path, _ = kit.write(tmp_path, **SIZES)

    told = drill(run.load(path), name, value, open=run.in_process)

    by_hand = injected_by_hand(tmp_path, f"{{{name}: {value}}}")
    assert told.verdict.cells == by_hand.cells
    assert (told.outcome, told.exit_code) == (by_hand.outcome, by_hand.exit_code)
    assert told.outcome == outcome
    assert told.deciding == deciding
    assert 0 < told.tokens == by_hand.tokens
    assert all(gate.passes is not None for gate in told.gates)


def test_a_drill_of_identity_is_refused_as_the_check_is_and_none_is_of_no_fault(tmp_path):
    path, _ = kit.write(tmp_path, **SIZES)

    told = drill(run.load(path), "permuted_ids", open=run.in_process)

    assert isinstance(told.refused, IdentityError)
    assert (told.verdict, told.outcome, told.exit_code) == (None, "refused", 4)
    assert (told.value, told.gates, told.deciding) == (1, (), ())
    with pytest.raises(MeasurementError, match="there is no fault 'none'"):
        drill(run.load(path), "none", open=run.in_process)


# the command line


def demo(*arguments):
    return CliRunner().invoke(main, ["demo", "--quiet", *map(str, arguments)])


def test_the_list_shows_every_fault_with_side_default_and_meaning():
    done = demo("--fault", "list")

    assert done.exit_code == 0
    for name, fault in FAULTS.items():
        assert f"{name}  ({fault.side}, default " in done.output
        assert fault.summary in done.output
        assert fault.seen in done.output


VALUE = "--value: fault 'lost_sequences' takes a number in (0, 1], found"


@pytest.mark.parametrize(
    ("words", "said", "hint"),
    [
        (
            ["--fault", "int8"],
            "there is no fault 'int8'",
            "did you mean 'int4'? (`servanda demo --fault list` shows them all)",
        ),
        *[
            (["--fault", "lost_sequences", "--value", value], VALUE, "hint: write --value '0.05'")
            for value in ("2", '"a"', "much", "[]")
        ],
        (["--value", "1"], "--value goes with --fault NAME", ""),
        (["--contract", "x.yaml"], "--contract goes with --fault NAME", ""),
    ],
)
def test_a_wrong_call_says_what_is_wrong_and_names_the_nearest(words, said, hint):
    done = demo(*words)

    assert done.exit_code == 2
    assert said in done.output and hint in done.output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "code", "said"),
    [
        (
            ["undisclosed_temperature", "--value", "0.3"],
            1,
            [
                "with kernels.infer.fault {undisclosed_temperature: 0.3}: The sampler",
                "VIOLATED: sampler_fidelity on all.",
                "With the thresholds of other projects: none of 7 fires on these",
            ],
        ),
        (
            ["off_by_one_shift"],
            1,
            ["6 of 7 fire on these 781 tokens: ", "mean |Δ logp| ≤ 0.1 (slime)"],
        ),
        (["permuted_ids"], 4, ["the tokenizers differ", "nothing would have been refused"]),
    ],
)
def test_the_demo_exits_as_the_check_and_says_what_the_field_would_have(
    tmp_path, fault, code, said
):
    path, _ = kit.write(tmp_path, **SIZES)

    done = demo("--fault", *fault, "--contract", path)

    assert done.exit_code == code, done.output
    assert all(words in done.output for words in said)


BEFORE_A_KERNEL = """
import os, sys
from contextlib import contextmanager
from servanda.cli import demo
from servanda.cli.main import main
from servanda.errors import MeasurementError

def opened(kernel, side):
    os.write(1, f"opening: {sorted({'torch', 'transformers'} & set(sys.modules))}\\n".encode())
    raise MeasurementError("far enough")

@contextmanager
def kept():
    yield opened

demo.kept = kept
main(["demo"])
"""


def test_the_demo_says_what_it_does_before_a_kernel_or_torch_is_loaded(tmp_path):
    """The lines are in the pipe, not in a buffer, before the first kernel is opened."""
    done = subprocess.run(
        [sys.executable, "-c", BEFORE_A_KERNEL],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": ":".join(sys.path)},
    )

    command, number, _, loading, opening, *_ = done.stdout.splitlines()
    assert command.startswith("$ servanda check ")
    assert number.startswith("  run 1 of 2: ")
    assert loading == "run 1 of 2, loading the kernels ..."
    assert opening == "opening: []"


def test_the_runs_of_the_demo_share_two_children_and_change_no_evidence(tmp_path):
    plain, _ = kit.write(tmp_path / "plain", **SIZES)
    hotter = ", fault: {undisclosed_temperature: 0.3}"
    faulty, _ = kit.write(tmp_path / "faulty", infer=hotter, **SIZES)
    children = []
    with kept() as open_:

        def counted(kernel, side):
            worker = open_(kernel, side)
            children.append((side, worker.pid))
            return worker

        for number, path in enumerate((plain, faulty, plain)):
            shared = run.check(path, run_dir=tmp_path / f"shared {number}", open=counted)
            alone = run.check(path, run_dir=tmp_path / f"alone {number}", open=run.in_process)
            assert shared.evidence == alone.evidence
            assert shared.cells == alone.cells
        assert len(children) == 6 and len(set(children)) == 2
    for _, pid in children:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_the_demo_leaves_its_second_run_as_a_page(tmp_path, monkeypatch):
    told = iter([made.VERDICTS["holds"], made.VERDICTS["violated"]])
    monkeypatch.setattr(run, "check", lambda *_, **__: next(told))
    monkeypatch.chdir(tmp_path)

    done = demo()

    page = (tmp_path / "servanda-demo.html").read_text(encoding="utf-8")
    assert page.strip() == FORMATS["html"](made.VERDICTS["violated"]).strip()
    assert done.output.endswith("next: open servanda-demo.html in a browser\n")


def test_the_demo_writes_the_files_of_the_documents_and_replaces_none(tmp_path):
    done = demo("--files", tmp_path)
    assert done.exit_code == 0
    assert done.output == (
        f"wrote examples/, models/, data/ to {tmp_path}\n"
        f"next: cd {tmp_path} && servanda check examples/tiny-dump\n"
    )
    assert (tmp_path / "models/tiny-lm/model.safetensors").is_file()

    done = demo("--files", tmp_path)
    assert done.exit_code == 2
    assert done.output.endswith(
        f"{tmp_path / 'examples'} is there already\n"
        "  hint: name a new folder, or move this one away\n"
    )

    done = demo("--files", tmp_path / "new", "--fault", "renamed")
    assert done.exit_code == 2 and "--files runs nothing: leave out --fault" in done.output


def test_the_demo_ends_on_what_its_own_page_says_of_averages():
    """Two of three averages that do not see the slice, and one that does, are told as that."""
    found = (
        Gate("mean KL (k3) ≤ 0.015 (prime-rl)", 0.02, "0.02", False),
        Gate("mean |Δ logp| ≤ 0.1 (slime)", 0.02, "0.02", True),
        Gate("perplexity, ±1 %", 0.001, "", True),
        Gate("top-1 agreement ≥ 98 %", None, "not measured", None),
    )

    assert averages(found) == (
        "Of 4 thresholds of other projects, which look at the whole traffic, 2 pass it (mean "
        "|Δ logp| ≤ 0.1 (slime); perplexity, ±1 %) and 1 fail, and do not say where (mean KL (k3) "
        "≤ 0.015 (prime-rl))."
    )
    assert "fail" not in averages(found[1:])
    healthy = (Gate("mean KL (k3) ≤ 0.015 (prime-rl)", 0.03, "0.03", False),)
    assert averages(found, healthy).endswith(
        "The first run fails, too: mean KL (k3) ≤ 0.015 (prime-rl)."
    )
