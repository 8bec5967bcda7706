"""Keys: who may do what, and that no message ever repeats a key."""

import base64
import re
import subprocess
from pathlib import Path

import pytest

from servanda.cli import serve, serve_processes
from servanda.errors import ContractError
from servanda.gateway.controller.process import Settings
from servanda.gateway.http.api_keys import RIGHTS, ROLES, Holder, Keys
from tests.transcripts import blocks

DOCS = Path(__file__).parents[2] / "docs" / "how-to"

ANNA, GATE, USER = "anna-key-0123456789", "gate-key-0123456789", "user-key-0123456789"


def written(folder, text):
    path = folder / "keys.yaml"
    path.write_text(text, encoding="utf-8")
    path.chmod(0o600)
    return path


def problems(folder, text, environ=None):
    with pytest.raises(ContractError) as found:
        Keys.read(written(folder, text), environ or {})
    return str(found.value).replace(str(folder) + "/", "")


ENVIRON = {"ONCALL_KEY": ANNA, "ANNA_KEY": ANNA, "GATEWAY_KEY": GATE, "GATEWAY_2_KEY": GATE}


@pytest.mark.parametrize("page", ["gateway.md", "gateway_admin.md"])
def test_the_files_of_keys_that_the_documents_show_are_such_files(tmp_path, page):
    found = [b for b in blocks(DOCS / page, "yaml") if b.startswith("- {name: ")]
    assert found
    for text in found:
        assert len(Keys.read(written(tmp_path, text), ENVIRON).holders) == text.count("role:")


@pytest.mark.parametrize("roles", [("admin",), ("admin", "gateway")])
def test_the_line_that_takes_the_key_of_a_start_takes_it(tmp_path, roles):
    """As the document has it, of a file as `servanda serve` writes it."""
    text = (DOCS / "gateway_admin.md").read_text(encoding="utf-8")
    line = re.search(r"`export SERVANDA_ADMIN_KEY=\$\((.*NAME.*?)\)`", text)[1]
    settings = Settings(
        contract="", state=str(tmp_path / "runs/toy-gateway"), ledger="", host="", port=0
    )
    Path(settings.state).mkdir(parents=True)
    holders = serve._new_holders(*roles)
    serve_processes._write(holders, settings)
    done = subprocess.run(
        ["sh", "-c", line.replace("NAME", "toy")], cwd=tmp_path, capture_output=True, check=True
    )
    assert done.stdout.decode() == f"{holders[0][2]}\n"


def basic(user, key):
    return "Basic " + base64.b64encode(f"{user}:{key}".encode()).decode()


def test_a_file_of_keys_tells_who_asks(tmp_path):
    path = written(
        tmp_path,
        f"""
- {{name: anna, role: admin, key: {ANNA}}}
- {{name: gw-1, role: gateway, key_env: GATE_KEY}}
""",
    )

    keys = Keys.read(path, {"GATE_KEY": GATE})

    assert keys.who(f"Bearer {ANNA}") == Holder("anna", "admin")
    assert keys.who(f"bearer  {GATE} ") == Holder("gw-1", "gateway")
    assert keys.who(basic("whoever", ANNA)) == Holder("anna", "admin")
    assert keys.holders == (Holder("anna", "admin"), Holder("gw-1", "gateway"))


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        f"Bearer {ANNA}x",
        f"Bearer {ANNA[:-1]}",
        f"Token {ANNA}",
        ANNA,
        "Basic",
        "Basic !!!",
        basic(ANNA, ""),
        "Basic " + base64.b64encode(ANNA.encode()).decode(),
        "Bearer \udcff\udcfe",
        "Basic " + base64.b64encode(b"a:\xff\xfe").decode(),
        f"Bearer {ANNA}, Bearer {ANNA}",
    ],
)
def test_whoever_has_no_key_is_nobody(header):
    assert Keys(("anna", "admin", ANNA)).who(header) is None


def test_a_password_may_hold_colons():
    keys = Keys(("anna", "admin", "one:two:three:four"))
    assert keys.who(basic("me", "one:two:three:four")) == Holder("anna", "admin")


def test_all_keys_are_compared_whichever_it_is(monkeypatch):
    """No early exit: how long an answer takes says nothing of the key."""
    import hmac

    compared, real = [], hmac.compare_digest
    keys = Keys(*((f"k{i}", "viewer", f"key-{i}-0123456789abc") for i in range(5)))
    monkeypatch.setattr(
        "servanda.gateway.http.api_keys.hmac.compare_digest",
        lambda a, b: compared.append(b) or real(a, b),
    )

    for header in ("Bearer key-0-0123456789abc", "Bearer key-4-0123456789abc", "Bearer no", None):
        compared.clear()
        keys.who(header)
        assert len(compared) == 5
        assert {len(digest) for digest in compared} == {64}


def test_users_need_a_key_only_where_one_of_them_has_one():
    assert not Keys(("anna", "admin", ANNA), ("gw", "gateway", GATE)).clients
    assert Keys(("anna", "admin", ANNA), ("u", "client", USER)).clients


@pytest.mark.parametrize(
    ("role", "rights"),
    [
        ("client", {"ask"}),
        ("viewer", {"read"}),
        ("operator", {"read", "pin"}),
        ("admin", {"read", "pin", "reload"}),
        ("gateway", {"follow", "route"}),
    ],
)
def test_each_role_may_what_it_needs_and_no_more(role, rights):
    assert {right for right in RIGHTS if Holder("one", role).may(right)} == rights
    assert {*ROLES} == {"client", "viewer", "operator", "admin", "gateway"}


def test_every_problem_of_a_file_is_told_at_once_with_its_place(tmp_path):
    text = """- {name: anna, role: operater, key: short}
- {name: anna, role: admin, kye: abcdefghijklmnopqrst}
- {name: bob, role: admin, key: abcdefghijklmnopqrst}
- {name: eve, role: admin, key: abcdefghijklmnopqrst}
- {name: "a b", role: viewer, key_env: NOT_SET}
- {name: x, role: boss, key: 12345678901234567890}
- {name: y, role: viewer, key: "blanks in it are no good"}
- just text
"""
    found = problems(tmp_path, text)

    assert found.splitlines() == [
        "keys.yaml:1:22: a holder needs a role",
        "  hint: did you mean 'operator'?",
        "keys.yaml:1:37: a key of 5 characters is too short: 16 at least",
        "  hint: python -c 'import secrets; print(secrets.token_urlsafe(32))' makes one",
        "keys.yaml:2:3: a holder needs either key or key_env",
        "  hint: key_env names a variable of the environment",
        "keys.yaml:2:10: anna is there already, in line 1",
        "  hint: two keys of one person have two names, such as anna-2",
        "keys.yaml:2:29: a holder has no such key",
        "  hint: did you mean 'key'?",
        "keys.yaml:4:33: this is the key of line 3 again",
        "  hint: each holder has a key of their own",
        "keys.yaml:5:10: a holder needs a name",
        "  hint: it begins with a letter or digit and has those, '.', '_' and '-', at most 80",
        "keys.yaml:5:40: there is no variable 'NOT_SET'",
        "  hint: export it before the start",
        "keys.yaml:6:19: a holder needs a role",
        "  hint: known: client, viewer, operator, admin, gateway",
        "keys.yaml:6:30: a key is text",
        "  hint: put it in quotes",
        "keys.yaml:7:32: a key has printable characters of ASCII and no blanks",
        "  hint: a header carries no others",
        "keys.yaml:8:3: a holder is a mapping",
        "  hint: write - {name: anna, role: operator, key_env: ANNA_KEY}",
    ]


SECRET = "s3cr3t-0123456789-s3cr3t"


@pytest.mark.parametrize(
    "text",
    [
        f"- {{name: a, role: admin, key: {SECRET}",  # never closed
        f"- {{name: a, role: admin, key: *{SECRET}}}",  # read as an alias
        f"- {{name: a, role: admin, key: !{SECRET} x}}",  # read as a tag
        f"- {{name: a, role: admin, {SECRET}: 1, {SECRET}: 2}}",
        f"- {{name: a, role: admin, {SECRET}: key}}",
        f"- {{name: a, role: {SECRET}, key: short}}",
        f"- {{name: '{SECRET} ', role: admin, key: short}}",
        f"- {{name: a, role: admin, key_env: {SECRET}}}",
        f"- {{name: a, role: admin, key: [{SECRET}]}}",
        f"- {{name: a, role: admin, key: {SECRET}, key_env: {SECRET}}}",
        f"- {SECRET}",
        f"{SECRET}: admin",
        SECRET,
        f"- {{name: a, role: admin, key: '{SECRET}\x07'}}",
        f"- a: {SECRET}: b",
        f'- "{SECRET}',
    ],
)
def test_no_message_repeats_a_key(tmp_path, text):
    found = problems(tmp_path, text)
    assert "keys.yaml:1:" in found
    assert SECRET not in found
    assert "hint: " in found


@pytest.mark.parametrize("text", ["", "# nothing\n", "[]", "- \n---\n- ", "\xff: 1"])
def test_a_file_that_lists_nothing_is_refused(tmp_path, text):
    assert "hint: write - {name: anna, role: operator" in problems(tmp_path, text)


def test_a_file_that_is_not_there_or_not_utf8_or_huge_is_refused(tmp_path):
    with pytest.raises(ContractError, match=r"keys\.yaml cannot be read: No such file"):
        Keys.read(tmp_path / "keys.yaml")
    path = tmp_path / "bytes.yaml"
    path.write_bytes(b"- \xff\xfe")
    with pytest.raises(ContractError, match=r"bytes\.yaml:1:3: this is not a list of keys"):
        Keys.read(path)
    path.write_bytes(b"#" * (2 << 20))
    with pytest.raises(ContractError, match="is larger than 1,048,576 bytes"):
        Keys.read(path)


def test_a_key_in_no_repr_and_in_no_attribute():
    keys = Keys(("anna", "admin", ANNA))
    assert repr(keys) == "Keys of anna (admin)"
    assert ANNA not in repr(vars(keys))
    assert repr(Keys()) == "Keys of no one"


def test_a_file_that_others_may_read_is_warned_of(tmp_path):
    path = written(tmp_path, f"- {{name: anna, role: admin, key: {ANNA}}}\n")
    assert Keys.read(path).warning == ""

    path.chmod(0o640)

    assert Keys.read(path).warning == (
        f"{path} can be read by others than its owner: chmod 600 {path}"
    )
