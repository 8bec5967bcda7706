# The class of a pair: its rule, on verdicts that were never measured and on real kernels.

import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest
import yaml

from servanda.judgement.breakdown import Rung
from servanda.judgement.token_profile import Portrait, Sums
from servanda.judgement.verdict import Circumstances
from servanda.runner import precision_ladder
from servanda.runner.finished_run import read
from servanda.runner.run_history.agreement_class import SPREAD, agreement_class
from servanda.runner.run_history.badge import badge
from servanda.theory.stats.agreement import ENOUGH, ROUNDING_NATS
from tests.report import made
from tests.runner.test_precision_ladder import CONTRACT, folder  # noqa: F401 - a fixture
from tests.test_command_line import servanda

FORMATS = {"bfloat16": 0.002, "fp8_channel": 0.004, "mxfp8": 0.005, "int4_g32": 0.01}


def verdict(mean=1e-3, tv=None, outcome="holds", n=100, slices=(), formats=FORMATS, **changes):
    """A verdict with this mean |log ratio|, in nats, and this place on the ladder."""
    parts = {name: Sums(n, abs_log_ratio=n * x) for name, x in slices}
    portrait = Portrait(Sums(n, abs_log_ratio=n * mean), slices=parts)
    rungs = [Rung(name, at) for name, at in formats.items()]
    if tv is not None:
        rungs.append(Rung("B", tv, candidate=True))
    around = Circumstances(rungs=tuple(rungs))
    base = made.VERDICTS[outcome]
    return replace(base, portraits={"infer": portrait}, circumstances=around, **changes)


@pytest.mark.parametrize(
    ("made_", "name"),
    [
        (verdict(0.0), "bitwise equal"),
        (verdict(0.0, outcome="error"), "bitwise equal"),  # `bitwise: true` was not declared
        (verdict(0.0, cells=(made.cell(section="numerical"),)), "not classified"),
        (verdict(0.0, n=ENOUGH - 1), "not classified"),
        (verdict(ROUNDING_NATS), "agrees to float32 rounding"),
        (verdict(ROUNDING_NATS, outcome="violated"), "agrees to float32 rounding"),
        (verdict(ROUNDING_NATS, slices=[("long", 2 * ROUNDING_NATS)]), "not classified"),
        (verdict(tv=0.0001), "agrees to bf16 rounding"),
        (verdict(tv=0.002 * SPREAD), "agrees to bf16 rounding"),
        (verdict(tv=0.00251), "agrees to fp8 rounding"),
        (verdict(tv=0.005 * SPREAD), "agrees to fp8 rounding"),
        (verdict(tv=0.00626), "disagrees"),
        (verdict(tv=0.0001, outcome="violated"), "disagrees"),
        (verdict(tv=0.0001, outcome="error"), "not classified"),
        (verdict(), "not classified"),
        (verdict(tv=0.001, formats={}), "not classified"),
    ],
)
def test_the_first_class_whose_rule_is_met(made_, name):
    assert agreement_class(made_).name == name


def test_the_reason_has_the_numbers():
    assert agreement_class(verdict(tv=0.006)).reason == (
        "mean tv 0.006, 1.2 times that of mxfp8, at most 1.25 times agree"
    )
    assert "check --ladder" in agreement_class(verdict()).reason
    slices = [("long", 4e-6)]
    assert (
        "at most 4×10⁻⁶ nats on each slice (long)"
        in agreement_class(verdict(1e-6, slices=slices)).reason
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "name"),
    [
        ({"attention": "eager"}, "bitwise equal"),
        ({"attention": "sdpa"}, "agrees to float32 rounding"),
        ({"dtype": "bfloat16", "attention": "sdpa"}, "agrees to bf16 rounding"),
        ({"dtype": "bfloat16", "quantization": "fp8_tensor"}, "agrees to fp8 rounding"),
        ({"dtype": "bfloat16", "quantization": "nvfp4"}, "disagrees"),
    ],
)
def test_real_kernels_have_the_class_of_their_format(folder, monkeypatch, kernel, name):  # noqa: F811
    rungs = {f: precision_ladder.RUNGS[f] for f in ("bfloat16", "fp8_channel", "mxfp8")}
    monkeypatch.setattr(precision_ladder, "RUNGS", rungs)
    train = {**CONTRACT["kernels"]["train"], "attention": "eager"}
    contract = {**CONTRACT, "kernels": {"train": train, "infer": {**train, **kernel}}}
    # decoding rounds otherwise than prefill, by which train scores golden texts
    path = "prefill" if name == "bitwise equal" else "decode"
    contract["golden"] = {**contract["golden"], "path": path}
    (folder / "c.yaml").write_text(yaml.safe_dump(contract))
    words = ["check", "c.yaml", "--ladder", "--run-dir", "runs/a", "--quiet"]

    assert servanda(*words).exit_code in (0, 4)  # 4: equal in every bit, and not declared

    found = agreement_class(read(folder / "runs/a"))
    assert found.name == name, found
    done = servanda("tools", "history", "runs", "--badge", "a.svg")
    assert f"class of the newest run: {name} (" in done.stdout
    assert ET.parse("a.svg").getroot().get("aria-label") == f"kernels: {name}"


def test_a_badge_is_xml_of_the_width_of_its_words():
    hostile = 'a<b> & "c"'
    root = ET.fromstring(badge("kernels", hostile))
    boxes = [e for e in root if e.tag.endswith("rect")]
    assert [e.text for e in root if e.tag.endswith("text")] == ["kernels", hostile]
    assert int(root.get("width")) == sum(int(box.get("width")) for box in boxes)


def test_a_badge_is_that_of_one_contract(tmp_path):
    from tests.runner.run_history import many

    for n, name in enumerate(("chat", "code")):
        many.write(tmp_path, n, many.verdict(n, contract=name))
    done = servanda("tools", "history", tmp_path, "--badge", tmp_path / "b.svg")
    assert done.exit_code == 4 and "a badge is that of one" in done.stderr
    assert "hint: give the folder of one: chat, code" in done.stderr
    assert not (tmp_path / "b.svg").exists()
