# What the page says of cells, in words.

from dataclasses import replace

from servanda.leader.standing import CellStanding, SliceStanding
from servanda.leader.web import words


def test_how_tokens_are_drawn_comes_first_only_where_it_is_suspicious():
    tv = CellStanding("tv", 0.1, value=0.02, log_evidence=0.1, log_price=9.0)
    drawn = CellStanding(
        "sampler_fidelity", 0.0, "nats", value=-0.3, log_evidence=2.0, log_price=9.0, refutes=True
    )
    one = SliceStanding("a", "active", 0.0, cells=(drawn, tv))
    assert words.worst(one) is tv

    bad = replace(drawn, log_evidence=5.0)
    assert words.worst(replace(one, cells=(bad, tv))) is bad
    assert words.value(bad) + words.versus(bad) == "0.3000 nats a token less likely than reported"
    assert words.value(tv) + words.versus(tv) == "0.0200, limit 0.1"
