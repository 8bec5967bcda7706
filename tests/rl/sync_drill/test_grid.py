# The result of a preflight sync test as a page: a box for each layer and group.

import math
import re
from html import unescape

import pytest

from servanda.cli.main import main
from servanda.rl.sync_drill.drill import conclude
from servanda.rl.sync_drill.report import WHOLE, Box, boxes, page
from servanda.rl.sync_drill.result import Baseline, Part, PoisonResult, Response


def response(name, kind="mlp", layer=None, follow=1.0, residual=1.0, parts=(), **more):
    return Response(name, kind, layer, follow, 0.01, residual, 12.0, 0.1, name, parts, **more)


def result(*groups):
    baseline = Baseline(0.027, 0.028, 0, 0, 0, 0.027)
    poison = PoisonResult(2.3, 3.0, 0.9, 0.67, "violated")
    numbers = {"returned": 0.001, "back_late": 0, "syncs": 17, "tokens": 640, "seconds": 3.0}
    return conclude(baseline, poison, groups, unprobed=502, **numbers)


def norms(name, *follows):
    parts = tuple(Part(f"layers.{i}", follow, 0.01, 12.0) for i, follow in enumerate(follows))
    return response(name, "norms", parts=parts)


EVERY = (
    response("embed/lm_head", "tied"),
    norms("norms.input_layernorm", 1.0, 0.0, 1.0),
    response("norms.norm", "norms", follow=math.nan),
    response("layers.0.attn", "attn", 0, follow=0.97),
    response("layers.0.mlp", "mlp", 0, follow=0.0),
    response("layers.1.attn", "attn", 1, follow=0.8, residual=9.0),
    response("layers.1.mlp", "mlp", 1, follow=1.0, residual=3.5),
    response("layers.2.attn", "attn", 2),
)


def rows(page):
    """Row -> its cells as texts, of the first table."""
    table = page.partition("<table")[2].partition("</table>")[0]
    found = {}
    for line in re.findall("<tr>(.*?)</tr>", table, re.S):
        cells = re.findall("<t[dh][^>]*>(.*?)</t[dh]>", line, re.S)
        texts = [unescape(re.sub("<svg.*?</svg>|<[^>]+>", "", cell)) for cell in cells]
        found[texts[0]] = texts[1:]
    return found


def test_each_group_has_one_box_with_its_shape_and_its_slope():
    found = boxes(result(*EVERY))

    assert [*found] == [WHOLE, "0", "1", "2"]
    assert found["0"] == {
        "norms.input_layernorm": Box("holds", 1.0),
        "attn": Box("holds", 0.97),
        "mlp": Box("violated", 0.0),
    }
    assert found["1"] == {
        "norms.input_layernorm": Box("violated", 0.0),
        "attn": Box("error", 0.8),
        "mlp": Box("inconclusive", 1.0),
    }
    assert found["2"] == {"norms.input_layernorm": Box("holds", 1.0), "attn": Box("holds", 1.0)}
    assert found[WHOLE]["norms.input_layernorm"].state == "error"  # a part of it is not synced
    assert found[WHOLE]["norms.norm"].state == "unseen"


def test_the_page_has_the_numbers_of_the_result():
    text = page(result(*EVERY))
    drawn = rows(text)

    heads = drawn["layer"]
    assert heads == ["attn", "mlp", "norms.input_layernorm", "embed/lm_head", "norms.norm"]
    assert [text[:4] for text in drawn["0"]] == ["0.97", "0.00", "1.00", "–", "–"]
    assert drawn["2"][1] == "–"  # the layer has no such group
    assert drawn["0"][1] == "0.00not synced"  # the shape in words, for those who do not see it
    assert text.count('class="m-violated"') == 1 + 2 + 1  # legend, grid, and the list of groups
    assert "0.67" in text and "640 probe tokens, 17 syncs" in text and "502 vocabulary ids" in text
    assert "<title>" in text and "<script" not in text and " title=" not in text


def test_groups_that_are_not_synced_are_told_in_view():
    text = page(result(*EVERY))

    assert "never reaches the engine" in text
    assert "0.80 ± 0.02" in text
    assert "not tested: no effect on the trainer's scores" in unescape(text)


def test_a_bundle_of_layers_fills_each_of_them():
    parts = (Part("layers.0 .. layers.2", 0.0, 0.01, 12.0), Part("layers.3", 1.0, 0.01, 12.0))
    found = boxes(result(response("norms.norm", "norms", parts=parts)))

    states = {row: box["norms.norm"].state for row, box in found.items()}
    assert states == {WHOLE: "error", **dict.fromkeys("012", "violated"), "3": "holds"}


def test_a_part_that_shows_nothing_is_not_called_synced():
    faint = Part("layers.0", 0.9, 0.4, 1.0)
    found = boxes(result(response("norms.norm", "norms", parts=(faint,))))

    assert found["0"]["norms.norm"].state == "unseen"


def test_one_group_and_none():
    one = page(result(response("lm_head", "head")))
    none = page(result())

    assert rows(one)[WHOLE] == ["1.00synced"]
    assert "No group was tested." in none and "Measurements" in none


def test_a_notebook_gets_the_transcript_and_the_page_in_a_frame():
    made = result(response("a<b", "rest"))
    html = made._repr_html_()

    assert html.startswith("<pre>found") and "a<b" not in html
    framed = unescape(html.partition('srcdoc="')[2].partition('"></iframe>')[0])
    assert framed == made.to_html()


def test_the_command_prints_the_page(monkeypatch, capsys, tmp_path):
    pytest.importorskip("torch")
    made = result(*EVERY)
    monkeypatch.setattr("servanda.rl.sync_drill.drill.preflight", lambda *_, **__: made)
    monkeypatch.setattr("servanda.rl.trainer_drill.trainee_of", lambda found: found)
    monkeypatch.setattr("servanda.rl.sync_drill.user_module.opened", lambda _: print("a banner"))

    with pytest.raises(SystemExit) as ended:
        main(["preflight", "x.py:y", "--quiet", "--format", "html"], standalone_mode=False)

    out = capsys.readouterr().out
    assert ended.value.code == 1
    assert out.rstrip() == made.to_html().rstrip()
