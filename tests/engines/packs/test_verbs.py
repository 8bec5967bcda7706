# Packs are pushed, listed and pulled, signed or not, by every kind of registry; and the mistakes.

import base64
import hashlib
import json
import shutil
import socket
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from servanda.cli.main import main
from servanda.contract.kernel_string import parse_kernel
from servanda.contract.kernel_writer import kernel_string
from servanda.engines.hub_cache import DOWNLOAD
from servanda.engines.packs import signature
from servanda.engines.packs.pack_registry import address_of, fetched
from servanda.errors import ContractError, MeasurementError
from tests.engines.packs import servers

OLD = Path(__file__).parents[2] / "data" / "of_0_1"
PACK = OLD / "infer.pack"
DIGEST = f"sha256:{hashlib.sha256(PACK.read_bytes()).hexdigest()}"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SERVANDA_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(signature.SIGNERS, raising=False)
    return tmp_path / "cache" / "packs"


@pytest.fixture(params=["folder", "http", "oci"])
def registry(request, tmp_path):
    folder = tmp_path / "registry"
    if request.param == "folder":
        yield str(folder)
    elif request.param == "http":
        with servers.http(folder) as url:
            yield f"{url}/team"
    elif servers.distribution() is None:
        pytest.skip("no registry of the CNCF distribution: apt-get install docker-registry")
    else:
        with servers.oci(folder) as host:
            yield f"oci://{host}/team"


@pytest.fixture
def keys(tmp_path):
    """Two keys, and a file of allowed signers for each."""
    if shutil.which("ssh-keygen") is None:
        pytest.skip("no ssh-keygen")
    made = {}
    for name in ("ana", "ben"):
        key = tmp_path / name
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
        signers = tmp_path / f"{name}_signers"
        signers.write_text(f"{name}@example.org {key.with_suffix('.pub').read_text()}")
        made[name] = key, signers
    return made


def packs(*words, code=0, **environment):
    given = ["tools", "packs", *map(str, words)]
    done = CliRunner().invoke(main, given, env=environment, prog_name="servanda")
    assert done.exit_code == code, done.output
    return done.output


def test_what_was_pushed_is_listed_and_pulled(registry, tmp_path, cache):
    assert packs("list", registry) == f"{registry} has no packs\n"

    pushed = packs("push", PACK, f"{registry}/base:v1")
    packs("push", PACK, f"{registry}/base:v2")
    packs("push", PACK, f"{registry}/other")
    pulled = json.loads(
        packs("pull", f"{registry}/base:v1", "-o", tmp_path / "x.pack", "--format", "json")
    )

    pinned = f"{registry}/base@{DIGEST}"
    assert pushed == f"{pinned} (not signed)\n"
    assert (pulled["address"], pulled["signer"]) == (pinned, None)
    assert (tmp_path / "x.pack").read_bytes() == PACK.read_bytes()
    listed = json.loads(packs("list", registry, "--format", "json"))
    assert {(row["name"], row["tag"]) for row in listed} == {
        ("base", "v1"),
        ("base", "v2"),
        ("other", "latest"),
    }
    assert {row["address"].partition("@")[2] for row in listed} == {DIGEST}
    assert len(json.loads(packs("list", registry, "base", "--format", "json"))) == 2


def test_a_push_is_printed_as_json(tmp_path):
    said = packs("push", PACK, f"{tmp_path}/r/base:v1", "--format", "json")
    assert json.loads(said) == {
        "address": f"{tmp_path}/r/base@{DIGEST}",
        "digest": DIGEST,
        "signed": False,
    }


def test_a_pack_by_its_digest_is_a_kernel(registry, tmp_path, monkeypatch):
    packs("push", PACK, f"{registry}/base:v1")
    shutil.copytree(OLD / "toy", tmp_path / "toy")
    monkeypatch.chdir(tmp_path)
    word = f"{registry}/base@{DIGEST}"

    kernel = parse_kernel(word, engines=["pack", "table"])
    by_path, by_address = (
        CliRunner().invoke(
            main, ["compare", str(a), "table:toy/p.json", "--quiet", "--format", "json"]
        )
        for a in (PACK, word)
    )

    assert (kernel.engine, kernel.model, kernel_string(kernel)) == ("pack", word, word)
    assert by_address.exit_code == by_path.exit_code == 1, by_address.output
    first, second = (json.loads(done.stdout)["cells"] for done in (by_path, by_address))
    assert [c["value"] for c in first] == [c["value"] for c in second]


def test_a_pinned_pack_needs_no_registry_once_it_is_cached(registry, tmp_path):
    packs("push", PACK, f"{registry}/base:v1")
    packs("pull", f"{registry}/base:v1")
    nowhere = f"http://127.0.0.1:{_closed_port()}/base@{DIGEST}"

    assert fetched(address_of(nowhere))[0].read_bytes() == PACK.read_bytes()


def test_a_damaged_copy_in_the_cache_is_fetched_anew(tmp_path, cache):
    packs("push", PACK, f"{tmp_path}/r/base:v1")
    packs("pull", f"{tmp_path}/r/base:v1")
    (kept,) = cache.glob("*.pack")
    kept.write_bytes(kept.read_bytes()[:-1])

    packs("pull", f"{tmp_path}/r/base:v1")

    assert kept.read_bytes() == PACK.read_bytes()


def stored(tmp_path):
    """The file that a registry of the test keeps the pack in."""
    files = [p for p in (tmp_path / "registry").rglob("*") if p.is_file()]
    return next(p for p in files if p.read_bytes() == PACK.read_bytes())


@pytest.mark.parametrize("change", ["changed", "cut off"])
def test_what_was_tampered_with_is_refused(registry, tmp_path, cache, change):
    packs("push", PACK, f"{registry}/base:v1")
    data = bytearray(PACK.read_bytes())
    data[100] ^= 1
    stored(tmp_path).write_bytes(data if change == "changed" else data[: len(data) // 2])

    said = packs("pull", f"{registry}/base@{DIGEST}", code=4)

    assert f"{registry}/base@{DIGEST} is not what its digest says: what was sent has" in said or (
        "cannot be reached" in said  # the registry itself found that the file is too short
    )
    assert "hint: " in said
    assert not [*cache.glob("*.pack")]


def test_a_signed_pack_is_accepted_by_its_key_alone(registry, keys):
    key, signers = keys["ana"]
    assert packs("push", PACK, f"{registry}/base:v1", "--sign", key).endswith("(signed)\n")

    said = packs("pull", f"{registry}/base:v1", "--signers", signers)
    assert said.endswith("digest verified, signed by ana@example.org\n")

    ben = keys["ben"][1]
    refused = packs("pull", f"{registry}/base:v1", "--signers", ben, code=4)
    assert f"{registry}/base@{DIGEST} is signed by a key that {ben} does not have" in refused
    assert "hint: add the signer's key if you trust it" in refused


def test_an_unsigned_pack_is_refused_where_a_signature_is_asked_for(registry, keys):
    key, signers = keys["ana"]
    packs("push", PACK, f"{registry}/base:v1")

    refused = packs("pull", f"{registry}/base:v1", SERVANDA_PACK_SIGNERS=str(signers), code=4)

    assert (
        f"{registry}/base@{DIGEST} is not signed, and {signers} asks for a signature\n" in refused
    )
    assert "hint: push it with --sign KEY, or leave --signers out" in refused
    packs("push", PACK, f"{registry}/base:v1", "--sign", key)
    packs("pull", f"{registry}/base:v1", SERVANDA_PACK_SIGNERS=str(signers))


def test_the_signature_of_another_pack_is_no_signature(tmp_path, keys):
    key, signers = keys["ana"]
    packs("push", PACK, f"{tmp_path}/r/base:v1")
    other = tmp_path / "other"
    other.write_text("another file")
    (tmp_path / "r" / "base" / f"{DIGEST.replace(':', '/')}.sig").write_bytes(
        signature.sign(other, key)
    )

    said = packs("pull", f"{tmp_path}/r/base:v1", "--signers", signers, code=4)

    assert "by ana@example.org is not valid" in said and "push it again with --sign" in said


def test_signers_are_asked_for_whatever_reads_a_pack(tmp_path, keys, monkeypatch):
    packs("push", PACK, f"{tmp_path}/r/base:v1")
    packs("pull", f"{tmp_path}/r/base:v1")  # what is in the cache is asked for its signature too
    monkeypatch.setenv(signature.SIGNERS, str(keys["ana"][1]))

    words = ["compare", f"{tmp_path}/r/base@{DIGEST}", f"table:{OLD}/toy/p.json", "--quiet"]
    done = CliRunner().invoke(main, words)

    assert done.exit_code == 4 and "is not signed" in done.output


def test_mistakes_have_a_next_move(registry, tmp_path, keys):
    packs("push", PACK, f"{registry}/base:v1")

    said = packs("pull", f"{registry}/base:v2", code=4)
    assert f"{registry}/base has no tag 'v2'" in said and "v1" in said
    said = packs("pull", f"{registry}/bose:v1", code=4)
    assert f"{registry} has no pack 'bose'" in said and "tools packs list" in said
    none = f"sha256:{'0' * 64}"
    said = packs("pull", f"{registry}/base@{none}", code=4)
    assert f"{registry} has no pack 'base' of {none}" in said
    said = packs("push", PACK, f"{registry}/base@{DIGEST}", code=2)
    assert "has a digest, which the pack has by itself" in said
    said = packs("push", PACK, f"{registry}/base:v1", "--sign", keys["ana"][1], code=2)
    assert "did not sign" in said and "ssh-agent" in said
    said = packs("pull", f"{registry}/base:v1", "--signers", tmp_path / "none", code=2)
    assert f"there is no file {tmp_path / 'none'} of keys" in said


def test_what_is_no_pack_is_not_published(tmp_path):
    (tmp_path / "x").write_text("no pack")
    said = packs("push", tmp_path / "x", f"{tmp_path}/r/base:v1", code=4)
    assert "is no reference pack" in said and not (tmp_path / "r").exists()
    said = packs("push", PACK, "base", code=2)
    assert "'base' is no address of a pack in a registry" in said and "oci://HOST/NAME" in said


@pytest.mark.parametrize("scheme", ["http", "oci"])
def test_no_network(scheme):
    place = f"{scheme}://127.0.0.1:{_closed_port()}"
    said = packs("pull", f"{place}/base:v1", code=4)
    assert f"{place} cannot be reached: " in said
    assert "check the address and the network; a pack that was pulled before is read" in said


@pytest.fixture
def login(tmp_path, monkeypatch):
    """Writes what `docker login` keeps for a host."""
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))

    def write(host, user):
        auth = base64.b64encode(user).decode()
        (tmp_path / "config.json").write_text(json.dumps({"auths": {host: {"auth": auth}}}))

    return write


def test_a_registry_is_told_the_user_and_asked_again_with_the_token(login):
    with servers.token_registry() as (host, asked):
        said = packs("list", f"oci://{host}", "a", code=4)  # no login: no password is sent
        assert "401" in said and "docker login" in said
        login(host, b"ana:secret")
        asked.clear()
        assert packs("list", f"oci://{host}", "a").startswith(f"oci://{host} has no pack 'a'")
    (_, first), (token, basic), (_, bearer) = asked
    assert (first, basic[:5], bearer) == ("", "Basic", "Bearer t")
    assert "scope=repository%3Aa%3Apull" in token and "service=s" in token


def test_a_password_is_sent_to_no_realm_without_tls_nor_to_another_host(login):
    with servers.token_registry("http://realm.example/token") as (host, asked):
        login("registry.example", b"ana:secret")
        packs("list", f"oci://{host}", "a", code=4)
        login(host, b"ana:secret")
        said = packs("list", f"oci://{host}", "a", code=4)
        assert "asks for its password at http://realm.example/token, without TLS" in said
        assert {given for _, given in asked} == {""}


def _closed_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def test_a_tag_as_a_kernel_says_how_to_find_the_digest():
    with pytest.raises(ContractError, match="named by its digest") as caught:
        parse_kernel("oci://host/base:v1", engines=["pack"])
    assert "servanda tools packs pull oci://host/base:v1" in str(caught.value)


# the Hub, by the cache that huggingface_hub keeps: no request is made


def test_a_pack_of_the_hub_is_read_from_its_cache(tmp_path, monkeypatch):
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.delenv(DOWNLOAD, raising=False)
    packs("push", PACK, f"{tmp_path}/r/base:v1")
    commit = "a" * 40
    place = tmp_path / "hub" / "datasets--org--packs"
    shutil.copytree(tmp_path / "r", place / "snapshots" / commit)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text(commit)

    assert packs("pull", "hf://org/packs/base:v1").startswith(f"hf://org/packs/base@{DIGEST}: ")

    said = packs("pull", "hf://org/none/base:v1", code=4)
    assert "index.json of hf://org/none is not in the Hub's cache" in said
    assert f"hf download --repo-type dataset org/none index.json, or set {DOWNLOAD}=1" in said
    said = packs("push", PACK, "hf://org/packs/base:v2", code=4)
    assert f"is not written to unless {DOWNLOAD}=1 is set" in said


def test_an_index_of_a_newer_version_is_refused(tmp_path):
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "index.json").write_text('{"schema": 7, "packs": {}}')
    with pytest.raises(MeasurementError, match=r"has schema 7, and this version .* up to 1"):
        fetched(address_of(f"{tmp_path}/r/base:v1"))
