# The catalogue itself: what every entry has, which values it takes, which engines it fits.

import json
import math
import subprocess
import sys
from dataclasses import replace

import pytest
from benchmarks import faults_page, truth_table
from hypothesis import given
from hypothesis import strategies as st

from servanda.contract.model import Kernel
from servanda.engines import open_engine
from servanda.engines.faults import FAULTS, injected
from servanda.engines.faults.base import Between, OneOf, Switch, fault
from servanda.errors import ContractError, MeasurementError
from servanda.runner import run
from servanda.theory.sampling import Sampling
from servanda.traces.trace import Batch
from tests import kit

every = pytest.mark.parametrize("name", [*FAULTS])
ON_TABLES = {
    "lost_sequences",
    "lost_top_token",
    "off_by_one_shift",
    "permuted_ids",
    "undisclosed_min_p",
    "undisclosed_temperature",
    "undisclosed_top_p",
}
NONSENSE = ["much", None, -1, 0, math.nan, math.inf, [], {"value": 1}, False, 1e12]


def test_the_catalogue_has_the_bugs_of_the_field():
    assert len(FAULTS) >= 19
    assert {f.side for f in FAULTS.values()} == {"train", "infer"}


@every
def test_a_fault_says_what_it_is_and_takes_its_own_default(name):
    entry = FAULTS[name]

    assert entry.name == name
    assert entry.summary.endswith(".") and entry.summary[0].isupper()
    assert "\n" not in entry.summary + entry.seen
    assert entry.side in ("train", "infer")
    assert entry.problem(entry.default) is None
    assert json.loads(json.dumps(entry.default)) == entry.default  # a contract can say it


@every
@pytest.mark.parametrize("value", NONSENSE, ids=str)
def test_a_value_it_does_not_take_is_refused_with_one_that_it_does(name, value):
    entry = FAULTS[name]
    if value in entry.takes:
        pytest.fail(f"{name} takes {value!r}")

    problem = entry.problem(value)

    assert problem.message == f"fault {name!r} takes {entry.takes}, found {value!r}"
    assert problem.hint == f"write fault: {{{name}: {json.dumps(entry.default)}}}"
    with pytest.raises(MeasurementError, match="takes"):
        entry.inject(object, value)


@pytest.mark.parametrize(
    ("takes", "inside", "outside", "says"),
    [
        (Between(0, 1), [0.5, 1, 1e-9], [0, 1.1, True, "1"], "a number in (0, 1]"),
        (Between(1, 9, whole=True), [1, 9], [0, 10, 1.0, True], "a whole number in [1, 9]"),
        (Switch(), [True], [False, 1, "true"], "true"),
        (OneOf(("head", "token")), ["head"], ["heads", 1, []], "head or token"),
    ],
)
def test_what_values_are(takes, inside, outside, says):
    assert all(value in takes for value in inside)
    assert not any(value in takes for value in outside)
    assert str(takes) == says


def test_a_fault_that_refuses_its_own_default_cannot_be_registered():
    with pytest.raises(ValueError, match="'odd' takes true, and not its default 3"):
        fault("odd", "Odd.", default=3, takes=Switch())(lambda base, _: base)
    with pytest.raises(ValueError, match="'odd' takes true, and not 'often'"):
        fault("odd", "Odd.", default=True, takes=Switch(), field="often")(lambda base, _: base)
    with pytest.raises(ValueError, match=r"'odd' takes a number in \(0, 1\], and not 2"):
        fault("odd", "Odd.", default=1, takes=Between(0, 1), strengths=[1, 2])(lambda b, _: b)
    assert "odd" not in FAULTS


def test_the_place_of_a_wrong_value_is_shown(tmp_path):
    path, _ = kit.write(tmp_path, infer=", fault: {lost_sequences: often}")

    with pytest.raises(ContractError) as caught:
        run.load(path)

    line = next(i for i, t in enumerate(path.read_text().splitlines(), 1) if "often" in t)
    text = str(caught.value)
    assert f"toy.kernelcontract.yaml:{line}:" in text
    assert "fault 'lost_sequences' takes a number in (0, 1], found 'often'" in text
    assert "hint: write fault: {lost_sequences: 0.05}" in text
    assert caught.value.exit_code == 2


RECORDS, REAL = truth_table.read(), truth_table.read(truth_table.REAL_RECORDS)
MEASURE = "run python -m benchmarks.truth_table"


def test_the_page_is_what_its_records_say():
    page = faults_page.page(RECORDS, REAL)
    assert faults_page.DOCS.read_text(encoding="utf-8") == page, f"{MEASURE} --write"


@every
def test_every_fault_is_on_record_at_its_default(name):
    entry = FAULTS[name]

    assert faults_page.at_default(RECORDS, name), MEASURE
    assert (entry.field is None) == (not entry.field_source)


def test_a_page_names_what_was_not_measured_at_the_fields_value():
    less = {key: r for key, r in RECORDS.items() if key != ("norm_epsilon", "10.0")}

    told = faults_page.page(less, REAL).split("field's value: ")[1].split("\n")[0]

    assert "`norm_epsilon`" in told
    assert "missed there" in faults_page.page(RECORDS, REAL)


def test_a_gate_is_told_by_what_it_catches_and_what_it_misses():
    """Measured at 1, 2 and 8 of 1, 2, 4, 8: a gap is said, and neighbours are not."""
    told = faults_page._told

    assert told([1, 2, 4, 8], 2, 8) == "at most **`8`**, not `2`"
    assert told([1, 2, 4, 8], 4, 8) == "**`8`**, not `4`"
    assert told([1, 2, 4, 8], None, 1) == "**`1`**"
    assert told([1, 2, 4, 8], None, 2) == "at most **`2`**"
    assert told([1, 2, 4, 8], 8, None) == "not `8`"


def test_a_page_counts_what_is_missed_at_the_fields_value():
    """Doubt every record of the field: the page must not call a missed fault caught."""
    held = {
        key: replace(record, outcome="holds", exit=0)
        if json.dumps(getattr(FAULTS.get(key[0]), "field", None)) == key[1] != "null"
        else record
        for key, record in RECORDS.items()
    }

    told = faults_page.page(held, REAL)

    met = sum(faults_page.at_field(RECORDS, name) is not None for name in FAULTS)
    assert f"and **0 of {met} at the strength" in told
    assert "`undisclosed_top_p at 0.95`" in told.split("missed there: ")[1].split("\n")[0]


@pytest.mark.slow
@given(st.integers(0, 9), st.integers(1, 9))
def test_a_bisection_finds_the_weakest_that_is_caught_in_few_looks(first, size):
    looked = []

    def caught(value):
        looked.append(value)
        return value >= first

    found = truth_table.smallest(range(size), caught, None)

    assert found == min(first, size)
    assert len(looked) <= 2 + math.ceil(math.log2(size + 1))


# which engines a fault fits


def toy(tmp_path, **kernel):
    kit.table(tmp_path, "p.json", {"": kit.BASE})
    return Kernel(engine="table", model=str(tmp_path / "p.json"), **kernel)


@every
def test_a_table_has_the_fault_or_refuses_it_by_name(tmp_path, name):
    kernel = toy(tmp_path, fault={name: FAULTS[name].default})

    if name in ON_TABLES:
        assert open_engine(kernel).describe().fingerprint["engine"] == "table"
    else:
        with pytest.raises(MeasurementError) as caught:
            open_engine(kernel)
        assert str(caught.value).startswith(f"fault {name!r} cannot be injected into TableEngine")
        assert "hint: use engine: transformers for this fault" in str(caught.value)


def test_an_unknown_fault_is_refused_with_the_nearest(tmp_path):
    with pytest.raises(MeasurementError) as caught:
        open_engine(toy(tmp_path, fault={"lost_top_tokens": 0.1}))
    assert str(caught.value) == (
        "there is no fault 'lost_top_tokens'\n  hint: did you mean 'lost_top_token'?"
    )


def test_a_contract_is_given_a_fault_on_the_side_it_belongs_to(tmp_path):
    contract = run.load(kit.write(tmp_path)[0])

    lost = injected(contract, "lost_top_token").kernels
    dropped = injected(contract, "dropout_in_train", 0.2).kernels

    assert (lost.train.fault, lost.infer.fault) == (None, {"lost_top_token": 0.02})
    assert (dropped.train.fault, dropped.infer.fault) == ({"dropout_in_train": 0.2}, None)
    assert contract.kernels.infer.fault is None
    with pytest.raises(MeasurementError, match="found 'no'"):
        injected(contract, "int4", "no")
    with pytest.raises(MeasurementError, match="there is no fault 'zzz'"):
        injected(contract, "zzz")


def test_the_best_token_is_lost_on_the_share_of_steps_that_was_asked_for(tmp_path):
    healthy, lossy = (open_engine(toy(tmp_path, fault=f)) for f in (None, {"lost_top_token": 0.5}))
    n, width = 4000, 1
    batch = Batch(tuple(range(n)), ((1,),) * n, width)

    drawn = lossy.generate(batch, Sampling(), 3)

    top = max(kit.BASE)
    share = (drawn.token_N == kit.BASE.index(top)).mean()
    assert share == pytest.approx(0.5 * top, abs=0.025)  # three standard errors
    given = Batch(batch.sequence_S, batch.prompts, width, drawn.continuations)
    scored = healthy.score(given, Sampling(), "decode")
    assert all((drawn.columns[c] == scored.columns[c]).all() for c in scored.columns)


def test_a_token_that_has_all_the_mass_is_not_lost(tmp_path):
    kit.table(tmp_path, "p.json", {"": [0, 1, 0, 0, 0]})
    kernel = Kernel(engine="table", model=str(tmp_path / "p.json"), fault={"lost_top_token": 1.0})

    drawn = open_engine(kernel).generate(Batch((0,), ((1,),), 5), Sampling(), 3)

    assert drawn.token_N.tolist() == [1] * 5


@pytest.mark.slow
def test_the_catalogue_is_read_without_torch():
    code = "import servanda.runner.fault_drill, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
