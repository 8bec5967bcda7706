# The hook of examples/integrations/litellm, in a real LiteLLM proxy before two servers and a real
# leader.

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
from pathlib import Path

import httpx2
import pytest
from ruamel.yaml import YAML

from tests.gateway.leading import free_port, leading, pin
from tests.gateway.running import WAIT_S, until
from tests.gateway.serving import Fake, reply

EXAMPLE = Path(__file__).parents[2] / "examples" / "integrations" / "litellm"
KEY = f"sk-{secrets.token_hex(32)}"
LITELLM = shutil.which("litellm")


def completion(by):
    message = {"role": "assistant", "content": by}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    head = {"id": "c", "object": "chat.completion", "created": 1, "model": "my-model"}
    return reply({**head, "choices": [choice], "usage": usage})


@contextlib.contextmanager
def proxy(folder, pools, leader):
    """A client of LiteLLM's proxy that runs the example."""
    for name in ("servanda_routes.py", "config.yaml"):
        shutil.copy(EXAMPLE / name, folder)
    yaml = YAML(typ="safe")
    config = yaml.load((folder / "config.yaml").read_text())
    for deployment, pool in zip(config["model_list"], pools, strict=True):
        deployment["litellm_params"]["api_base"] = f"{pool.url}/v1"
    with (folder / "config.yaml").open("w") as file:
        yaml.dump(config, file)
    port = free_port()
    environ = {
        **{k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
        "SERVANDA_GATEWAY": leader.page,
        "SERVANDA_GATEWAY_KEY": leader.keys["gateway"],
        "SERVANDA_LABELS": "team",
        "LITELLM_MASTER_KEY": KEY,
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    words = [LITELLM, "--config", "config.yaml", "--host", "127.0.0.1", "--port", str(port)]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(words, cwd=folder, env=environ, stdout=log, stderr=log)
    try:
        own = {"authorization": f"Bearer {KEY}"}
        at = f"http://127.0.0.1:{port}"
        with httpx2.Client(base_url=at, headers=own, timeout=WAIT_S) as client:

            def answers():
                assert process.poll() is None, (folder / "log").read_text()
                with contextlib.suppress(httpx2.HTTPError):
                    return client.get("/health/liveliness").status_code == 200

            until(answers, "LiteLLM answers")
            yield client
    finally:
        process.terminate()
        process.wait(WAIT_S)


@pytest.mark.skipif(LITELLM is None, reason="no program litellm: pip install 'litellm[proxy]'")
def test_litellm_sends_each_request_to_the_pool_that_the_leader_decides(tmp_path):
    folder = tmp_path / "proxy"
    folder.mkdir()
    with (
        Fake(completion("infer")) as infer,
        Fake(completion("stable")) as stable,
        leading(tmp_path / "leader", (infer, stable)) as leader,
        proxy(folder, (infer, stable), leader) as client,
    ):

        def ask(team):
            body = {"model": "chat", "messages": [{"role": "user", "content": "hello"}]}
            answer = client.post("/v1/chat/completions", json={**body, "metadata": {"team": team}})
            assert answer.status_code == 200, answer.text
            return answer.json()["choices"][0]["message"]["content"]

        # LiteLLM alone would choose one of both at random
        assert [ask(team) for team in "adadadad"] == ["infer"] * 8
        pin(leader, "team=d", "stable")
        assert [ask(team) for team in "adadadad"] == ["infer", "stable"] * 4

        leader.close()  # without a decision stable serves
        assert [ask(team) for team in "adadadad"] == ["stable"] * 8
