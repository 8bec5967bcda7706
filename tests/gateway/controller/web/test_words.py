# What the page says of cells, in words.

from dataclasses import replace

from servanda.gateway.controller.status import CellStatus, SliceStatus
from servanda.gateway.controller.web import phrases


def test_how_tokens_are_drawn_comes_first_only_where_it_is_suspicious():
    tv = CellStatus("tv", 0.1, value=0.02, log_evidence=0.1, log_price=9.0)
    drawn = CellStatus(
        "sampler_fidelity", 0.0, "nats", value=-0.3, log_evidence=2.0, log_price=9.0, refutes=True
    )
    one = SliceStatus("a", "active", 0.0, cells=(drawn, tv))
    assert phrases.worst(one) is tv

    bad = replace(drawn, log_evidence=5.0)
    assert phrases.worst(replace(one, cells=(bad, tv))) is bad
    assert phrases.value(bad) + phrases.versus(bad) == "0.3 nats a token less likely than reported"
    assert phrases.value(tv) + phrases.versus(tv) == "0.02, limit 0.1"
