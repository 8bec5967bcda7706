# OpenAI's own client: what it gets of a gateway that samples all is what it gets of the server.

import re
import shutil

import httpx2
import openai
import pytest
from scripts import servers

from tests.gateway.openai_calls import CALLS, outcome
from tests.gateway.running import Program, until

CONTRACT = """\
apiVersion: servanda.dev/v1alpha1
kind: KernelContract
metadata: {{name: client}}
kernels:
  train: {{engine: transformers, model: "{model}"}}
  infer: {{engine: openai_http, url: "{infer}"}}
stable: {{engine: openai_http, url: "{stable}"}}
workload: {{prompts: prompts.jsonl, sampling: {{max_new_tokens: 16}}}}
statistical: [{{id: tv, metric: tv, aggregate: mean, at_most: 0.04}}]
routing: {{sample: 1.0, sample_near: 1.0, scorer_utilisation: 100}}
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The shipped model with a template of chats, which it has none of."""
    folder = tmp_path_factory.mktemp("model") / "tiny-lm"
    shutil.copytree(servers.MODEL, folder)
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    return folder


@pytest.fixture(scope="module")
def infer(model, tmp_path_factory):
    port, log = servers.free_port(), tmp_path_factory.mktemp("kernel") / "log"
    command = servers.kernel_command(port, f"transformers:{model}")
    with servers.running(command, port, log) as url:
        yield url


@pytest.fixture(scope="module")
def clients(model, infer, tmp_path_factory):
    """A client of the server, one of a gateway before it, and how many calls that sampled."""
    folder = tmp_path_factory.mktemp("gateway")
    stable = infer.replace("127.0.0.1", "localhost")  # the same server, by another name
    text = CONTRACT.format(model=model, infer=infer, stable=stable)
    (folder / "client.kernelcontract.yaml").write_text(text)
    (folder / "prompts.jsonl").write_text('{"prompt": "a"}\n')
    words = ("serve", "client.kernelcontract.yaml", "--port", 0, "--admin", "127.0.0.1:0")
    with Program(*words, cwd=folder) as serving:
        page = serving.line(r"page (http://\S+)")[1].rstrip("/")
        url = serving.line(r"serving users at (http://\S+)/v1")[1]
        key = re.search(r'key: "([\w-]+)', (folder / "runs/client-gateway/keys.yaml").read_text())[
            1
        ]
        direct, through = (
            openai.OpenAI(base_url=f"{at}/v1", api_key="any", max_retries=0) for at in (infer, url)
        )
        until(lambda: through.models.list().data, "it serves")

        def sampled():
            head = {"authorization": f"Bearer {key}"}
            gateways = httpx2.get(f"{page}/v1/status", headers=head).json()["gateways"]
            return gateways[0]["counts"].get("sampled", 0) if gateways else 0

        yield direct, through, sampled
        assert serving.end() == 0


def test_there_are_as_many_calls_as_were_tried_from_outside():
    assert len(CALLS) >= 49


@pytest.mark.sampled(25)
@pytest.mark.parametrize("name", CALLS)
def test_a_call_gets_what_it_gets_of_the_server_itself(clients, name):
    direct, through = (outcome(CALLS[name], client, "tiny-lm") for client in clients[:2])
    assert through == direct


@pytest.mark.slow
def test_what_was_sampled_was_so_all_the_same(clients):
    _, through, sampled = clients
    before = sampled()
    for name in ("completion: plain", "chat: plain", "chat: stream", "completion: logprobs"):
        outcome(CALLS[name], through, "tiny-lm")
    until(lambda: sampled() >= before + 4, "four more were sampled")
