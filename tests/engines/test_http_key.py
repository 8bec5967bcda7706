# Servers that ask for a key: every verb sends it, and nothing else holds it.

import json

import pytest

from servanda.contract.model import Kernel
from servanda.engines.http import HTTPEngine
from servanda.errors import MeasurementError
from servanda.runner.load import load
from tests import kit
from tests.engines.replaying import records, replaying

pytest.importorskip("uvicorn")
from tests.engines.serving import Locked, live, table_engine
from tests.kit import servanda

KEY, NAME = "sk-Tq8mNf0oWk3rT8xQeY1bVhA", "TOY_KEY"
WRONG = "sk-another-key-of-somebody"
TRUE = {"": kit.moved(kit.BASE, 0.01)}


@pytest.fixture
def server(tmp_path):
    """A locked server, and its url."""
    (tmp_path / "kernel").mkdir()
    locks = []

    def locked(app):
        locks.append(Locked(app, KEY))
        return locks[0]

    with live(table_engine(tmp_path / "kernel", TRUE), locked=locked) as (client, _):
        locks[0].url = str(client.base_url).rstrip("/")
        yield locks[0]


@pytest.fixture
def contract(tmp_path, server, monkeypatch):
    """A contract whose infer is the server, and the folder it is measured from."""
    monkeypatch.chdir(tmp_path)
    path, _ = kit.write(tmp_path, q=TRUE, round=16, first=16, last=16, limit=0.4, stable=None)
    of_a_server = f'engine: openai_http, url: "{server.url}", key_env: {NAME}'
    path.write_text(path.read_text().replace("engine: table, model: q.json", of_a_server))
    return path


def holding(folder, text):
    """The files that hold a text."""
    return [p for p in folder.rglob("*") if p.is_file() and text.encode() in p.read_bytes()]


OF_CONTRACTS = {
    "check": ("--run-dir", "run", "--report", "r.html", "--report", "r.json", "--record", "i.rec"),
    "contract plan": (),
    "tools measure": ("--side", "infer", "--sequences", "16", "-o", "x.pack"),
    "promote": ("--ledger", "l.db"),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("verb", OF_CONTRACTS)
def test_a_verb_of_contracts_sends_the_key_and_keeps_it_nowhere(
    verb, tmp_path, server, contract, monkeypatch
):
    monkeypatch.setenv(NAME, KEY)

    done = servanda(*verb.split(), contract, *OF_CONTRACTS[verb])

    assert done.exit_code in (0, 3), done.output
    assert server.asked and {*server.asked} == {f"Bearer {KEY}"}
    assert KEY not in done.output and holding(tmp_path, KEY) == []


@pytest.fixture
def strings(tmp_path, server, monkeypatch):
    """Two kernel strings of the server, the second with a key that it does not know."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(NAME, KEY)
    monkeypatch.setenv("OTHER_KEY", WRONG)
    (tmp_path / "p.jsonl").write_text("".join(f'{{"prompt": "{t}"}}\n' for t in "abc"))
    return f"{server.url},key_env={NAME}", f"{server.url},key_env=OTHER_KEY"


@pytest.mark.slow
def test_compare_sends_the_key_of_each_string(tmp_path, server, strings):
    known, _ = strings
    kept = tmp_path / "kept.kernelcontract.yaml"
    sizes = ("--preset", "nvfp4", "--sequences", 256, "--max-new-tokens", 4)

    done = servanda(
        "compare", known, known, "--prompts", "p.jsonl", *sizes, "--save-contract", kept
    )

    assert done.exit_code in (0, 1, 3), done.output
    assert {*server.asked} == {f"Bearer {KEY}"}
    assert kept.read_text().count(f"key_env: {NAME}") == 2
    assert KEY not in done.output and holding(tmp_path, KEY) == []


def test_each_server_is_sent_the_key_of_its_own_string(tmp_path, server, strings):
    done = servanda("compare", *strings, "--prompts", "p.jsonl")

    assert done.exit_code == 4
    assert "the server does not take the key in OTHER_KEY" in done.output
    assert {*server.asked} == {f"Bearer {KEY}", f"Bearer {WRONG}"}
    assert WRONG not in done.output and holding(tmp_path, WRONG) == []


@pytest.mark.slow
def test_selftest_sends_the_key(server, strings):
    done = servanda("tools", "selftest", strings[0], "--prompts", "p.jsonl", "--sequences", 256)

    assert "against itself" in done.output and done.exit_code in (0, 1, 3), done.output
    assert {*server.asked} == {f"Bearer {KEY}"} and KEY not in done.output


def test_without_a_key_the_refusal_says_how_one_is_named(server):
    done = servanda("compare", server.url, server.url)

    assert done.exit_code == 4
    assert f"{server.url}/servanda/describe answered with status 401: no such key" in done.output
    assert "`key_env: NAME` beside the url, or `,key_env=NAME` behind it" in done.output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("value", "said", "hint"),
    [
        (None, f"is in {NAME}, and this variable is not set", f"export {NAME}, or take key_env"),
        ("", f"is in {NAME}, and this variable is empty", f"export {NAME}, or take key_env"),
        (f"{KEY}\n", f"the key in {NAME} has a blank, a line end", "with the key alone"),
        ("schlüssel", "or a character outside ASCII", "with the key alone"),
        (WRONG, "status 401: no such key: Bearer [key]", f"does not take the key in {NAME}"),
    ],
)
def test_a_key_that_is_missing_or_refused_is_told_by_its_variable(
    value, said, hint, tmp_path, contract, monkeypatch
):
    monkeypatch.delenv(NAME, raising=False)
    if value is not None:
        monkeypatch.setenv(NAME, value)

    done = servanda("check", contract, "--run-dir", "run")

    assert done.exit_code == 4
    assert said in done.output and "hint: " in done.output and hint in done.output
    if value:
        assert value.strip() not in done.output and holding(tmp_path, value.strip()) == []


def test_a_key_is_not_sent_to_where_a_redirect_leads(tmp_path, monkeypatch):
    monkeypatch.setenv(NAME, KEY)
    with replaying([]) as elsewhere, replaying(records("vllm")) as server:
        server.troubled = ("/servanda/describe",)
        server.troubles.append((307, "", {"location": f"{elsewhere.url}/?key={KEY}"}))
        with pytest.raises(MeasurementError, match="status 307") as caught:
            HTTPEngine(Kernel(engine="openai_http", url=server.url, key_env=NAME))
    assert elsewhere.asked == []
    assert KEY not in str(caught.value) and "[key]" in str(caught.value)


@pytest.mark.parametrize(
    "text", [f"<p>who is {KEY}?</p>", f'data: {{"error": "{KEY}"}}\n\n'], ids=["page", "event"]
)
def test_a_server_that_repeats_the_key_is_not_quoted_with_it(text, monkeypatch):
    monkeypatch.setenv(NAME, KEY)
    with replaying(records("vllm")) as server:
        engine = HTTPEngine(Kernel(engine="openai_http", url=server.url, key_env=NAME))
        server.stack.callback(engine.close)
        server.troubled = ("/v1/completions",)
        server.troubles.append((200, text, {}))
        with pytest.raises(MeasurementError) as caught:
            if text.startswith("data"):
                [*engine.transport.events("/v1/completions", {})]
            else:
                engine.transport.ask("/v1/completions", {})
    assert KEY not in str(caught.value) and "[key]" in str(caught.value)


def test_a_key_in_the_place_of_its_variable_is_refused_and_not_shown(contract):
    contract.write_text(contract.read_text().replace(NAME, KEY))

    done = servanda("contract", "lint", contract)

    assert done.exit_code == 2 and KEY not in done.output
    assert f"{contract}:6:" in done.output and "key_env is no name of a variable" in done.output
    assert "hint: write key_env: INFER_KEY; a key itself stands in no contract" in done.output

    done = servanda("compare", f"http://a:1,key_env={KEY}", "http://b:1")

    assert done.exit_code == 2 and KEY not in done.output
    assert "A: key_env is no name of a variable" in done.output
    assert "hint: write key_env=INFER_KEY" in done.output


def test_key_env_is_for_servers(contract):
    contract.write_text(
        contract.read_text().replace("model: p.json}", f"model: p.json, key_env: {NAME}}}")
    )
    assert (
        "engine table runs its model itself and takes no key_env"
        in servanda("contract", "lint", contract).output
    )


def test_a_contract_says_which_keys_it_sends_and_no_code_refuses_it(
    tmp_path, server, contract, monkeypatch
):
    """Its author chooses the variable and the address: of a stranger's, that is a theft."""
    monkeypatch.setenv(NAME, KEY)
    said = f"kernels.infer.key_env sends the key in {NAME} to {server.url}"

    assert f"  sends a key: {said}" in servanda("contract", "lint", contract).output
    assert json.loads(servanda("contract", "lint", contract, "--format", "json").output)[0][
        "keys"
    ] == [said]
    explained = servanda("contract", "explain", contract).output
    assert f"It sends keys (--no-code refuses it):\n  {said}" in explained
    for verb in OF_CONTRACTS:
        refused = servanda(*verb.split(), contract, *OF_CONTRACTS[verb], "--no-code")
        assert refused.exit_code == 2, refused.output
        assert f"{said}, and --no-code refuses it" in refused.output
    of_strings = servanda("compare", f"{server.url},key_env={NAME}", "table:p.json", "--no-code")
    assert of_strings.exit_code == 2 and "A.key_env sends the key" in of_strings.output
    assert server.asked == []
    assert f"sends a key: {said}" in servanda("check", contract, "--run-dir", "run").output


@pytest.mark.parametrize(
    ("environ", "sent", "said"),
    [
        ({NAME: KEY}, KEY, ""),
        ({NAME: WRONG, "SERVANDA_INFER_KEY": KEY}, KEY, ""),  # of this start
        ({NAME: WRONG}, WRONG, f"the server does not take the key in {NAME}"),
    ],
)
def test_a_gateway_sends_the_key_that_its_contract_names(
    environ, sent, said, server, contract, monkeypatch
):
    pytest.importorskip("aiohttp")
    from servanda.cli.gateway_pools import Waits, urls_of
    from servanda.cli.serve_processes import config_of

    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    loaded, lines = load(contract), []

    config = config_of(loaded, urls_of(loaded, None, None), Waits(1, 1), lines.append)

    assert config.infer.key == sent and {*server.asked} == {f"Bearer {sent}"}
    assert any(said in line for line in lines) and sent not in " ".join(lines)


def test_a_gateway_without_a_key_says_which_variable_holds_it(server, contract):
    pytest.importorskip("aiohttp")
    from servanda.cli.gateway_pools import Waits, urls_of
    from servanda.cli.serve_processes import config_of

    contract.write_text(contract.read_text().replace(f", key_env: {NAME}", ""))
    loaded, lines = load(contract), []

    config_of(loaded, urls_of(loaded, None, None), Waits(1, 1), lines.append)

    assert any("the server asks for a key: export SERVANDA_INFER_KEY" in line for line in lines)
