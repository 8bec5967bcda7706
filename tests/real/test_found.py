# The repros of docs/results/found.md print today what the record says, where the library is
# installed in the release of the record: `make hunt` makes that environment.

import pytest
from benchmarks.hunt import page
from benchmarks.hunt.__main__ import run
from benchmarks.hunt.findings import known


@pytest.mark.parametrize("finding", known(), ids=lambda finding: finding.name)
def test_a_repro_prints_what_is_on_record(finding, venvs):
    python = venvs / finding.at[0] / "bin" / "python"
    if not python.exists():
        pytest.skip(f"no environment {finding.at[0]}: make hunt")
    kept = page.recorded()["repros"][finding.name]

    printed = run(finding, str(python))

    if printed["versions"] != kept["versions"]:
        pytest.skip(f"on record is {kept['versions']}")
    assert [label for label, _ in printed["printed"]] == [label for label, _ in kept["printed"]]
    assert len({v for _, v in printed["printed"]}) == len({v for _, v in kept["printed"]})
