# Lint of a kernel behind a url: what speaks of a server, and what a server has not.

import pytest

from servanda.engines import engine_names
from servanda.errors import ContractError
from tests.kit import parse

GOOD = """\
apiVersion: servanda.dev/v1alpha1
kind: KernelContract
metadata: {name: x}
kernels:
  train: {engine: transformers, model: models/tiny}
  infer: {engine: openai_http, url: "http://127.0.0.1:8000", dialect: vllm, logprobs: raw}
workload: {prompts: p.jsonl, sampling: {max_new_tokens: 8}}
statistical:
  - {id: tv, metric: tv, aggregate: mean, at_most: 0.05}
"""


def problems(text):
    with pytest.raises(ContractError) as caught:
        parse(text, "x.yaml", engines=engine_names())
    return caught.value.problems


def test_a_server_is_a_kernel():
    contract, _ = parse(GOOD, "x.yaml", engines=engine_names())
    assert contract.kernels.infer.url == "http://127.0.0.1:8000"


@pytest.mark.parametrize(
    ("old", "new", "said", "hint"),
    [
        ('url: "http://127.0.0.1:8000", ', "", "needs the url of a server", "write url:"),
        ('"http://127.0.0.1:8000"', "127.0.0.1", "'127.0.0.1' is not the address", "write url:"),
        ('"http://127.0.0.1:8000"', '"ftp://a"', "'ftp://a' is not the address", "write url:"),
        ('"http://127.0.0.1:8000"', '"http://"', "'http://' is not the address", "write url:"),
        ("dialect: vllm", "model: m", "a server has loaded its model already", "remove model"),
        ("models/tiny", 'models/tiny, url: "http://a"', "takes no url", "engine: openai_http"),
        ("models/tiny", "models/tiny, logprobs: raw", "takes no logprobs", "openai_http"),
        ("dialect: vllm", "routes: replayed", "has no experts to replay", "kernels.train"),
    ],
)
def test_what_a_server_has_not_is_a_problem_with_its_place(old, new, said, hint):
    assert old in GOOD
    [problem] = problems(GOOD.replace(old, new, 1))

    assert said in problem.message and hint in problem.hint
    assert problem.where.line in (5, 6)
