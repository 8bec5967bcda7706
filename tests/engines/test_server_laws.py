# A kernel behind a socket keeps the laws of engines, as far as they speak of it.

import pytest

from servanda.contract.model import Kernel
from servanda.engines.conformance import check_engine
from servanda.engines.http.engine import HTTPEngine
from tests.engines.serving import live, table_engine


@pytest.mark.slow
def test_a_served_kernel_keeps_every_law_that_speaks_of_it(tmp_path):
    with live(table_engine(tmp_path)) as (client, _):
        kernel = Kernel(engine="openai_http", url=str(client.base_url), batch_size=8)
        report = check_engine(lambda: HTTPEngine(kernel))

    assert {f.law: f.message.partition(":")[0] for f in report.those("skipped")} == {
        "scores_know_the_filters": "it refuses top_k 1",
        "logits_agree_with_scores": "it has no full logits",
    }
