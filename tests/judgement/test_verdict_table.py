# A verdict for notebooks: a table of its cells, and HTML that is its text.

import math

import pytest

from servanda.errors import MeasurementError
from servanda.judgement import verdict as verdict_module
from servanda.rl.monitor.step import Step
from tests.report import made


def test_a_row_per_cell_with_its_numbers():
    verdict = made.VERDICTS["violated"]
    table = verdict.to_arrow()
    rows = table.to_pylist()
    assert [row["clause"] for row in rows] == [cell.clause for cell in verdict.cells]
    assert [row["value"] for row in rows] == [cell.value for cell in verdict.cells]
    assert rows[0]["low"] == verdict.cells[0].interval[0]
    assert {"e_holds", "e_violated", "limit", "floor", "n"} <= {*table.column_names}
    assert table.schema.metadata[b"evidence"] == verdict.evidence.encode()
    assert table.schema.metadata[b"outcome"] == b"violated"


@pytest.mark.parametrize("name", made.VERDICTS)
def test_every_verdict_becomes_a_table(name):
    table = made.VERDICTS[name].to_arrow()
    assert table.num_rows == len(made.VERDICTS[name].cells)


def test_a_number_that_does_not_exist_is_null():
    rows = made.VERDICTS["nothing measured"].to_arrow().to_pylist()
    assert rows[0]["value"] is None and not any(
        isinstance(value, float) and math.isnan(value) for row in rows for value in row.values()
    )


def test_a_data_frame_has_the_same_cells():
    pytest.importorskip("pandas")
    frame = made.VERDICTS["violated"].to_pandas()
    assert [*frame["outcome"]] == [cell.outcome for cell in made.VERDICTS["violated"].cells]


def test_without_pandas_the_error_names_the_extra(monkeypatch):
    monkeypatch.setattr(verdict_module, "find_spec", lambda _: None)
    with pytest.raises(MeasurementError, match=r"servanda\[pandas\]"):
        made.VERDICTS["holds"].to_pandas()


def test_a_notebook_shows_the_text_of_a_verdict():
    html = made.VERDICTS["hostile"]._repr_html_()
    assert html.startswith("<pre>") and "<script>" not in html and "&lt;script&gt;" in html


def test_a_step_is_shown_as_its_text_too():
    assert Step._repr_html_("a < b") == "<pre>a &lt; b</pre>"
