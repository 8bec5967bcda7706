# `servanda serve` with a certificate: as processes, with clients that know its authority alone.

import ssl

import httpx2
import pytest
import trustme
from click.testing import CliRunner

from servanda.cli import main
from tests.gateway.running import ADA, Serving, ask, key, until
from tests.gateway.serving import Fake, reply
from tests.gateway.test_reread import issued, row, write

SAID = {"object": "list", "data": [{"id": "toy", "object": "model"}], "choices": []}


@pytest.fixture(scope="module")
def authority():
    return trustme.CA()


@pytest.fixture(scope="module")
def pools(authority):
    """Two pools, each behind TLS with a certificate of the authority."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    with Fake(reply(SAID), context) as infer, Fake(reply(SAID), context) as stable:
        yield infer.url, stable.url


@pytest.fixture
def trusts(authority, tmp_path):
    """The environment in which the authority is trusted."""
    file = tmp_path / "ca.pem"
    file.write_bytes(authority.cert_pem.bytes())
    return {"SERVANDA_CA_FILE": str(file)}


def context_of(authority):
    found = ssl.create_default_context()
    authority.configure_trust(found)
    return found


def serving(folder, authority, pools, *words, **more):
    folder.mkdir()
    chain, private = issued(folder, authority, "127.0.0.1")
    words = (*words, "--tls-cert", chain, "--tls-key", private)
    return Serving(folder, pools, *words, verify=context_of(authority), **more)


@pytest.mark.slow
def test_users_the_leader_and_gateways_are_served_by_tls(tmp_path, authority, pools, trusts):

    folder = tmp_path / "serve"
    gate = "the-key-of-gateway-2"
    folder_of_second = tmp_path / "second"
    with serving(folder, authority, pools, **trusts) as first:
        first.begun()  # routes of the leader came, by TLS
        assert first.url.startswith("https://") and first.page.startswith("https://")
        write(
            folder / "keys.yaml",
            (folder / "keys.yaml").read_text() + "\n" + row("g-2", gate, "gateway"),
        )
        first.line("keys.yaml was read again: it has 27 keys")

        with pytest.raises(httpx2.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            httpx2.get(f"{first.url}/readyz")
        with pytest.raises(httpx2.TransportError):
            httpx2.get(f"{first.url.replace('https', 'http')}/readyz")

        asked = ["gateway", "status", "--gateway", first.page]
        known = {"SERVANDA_ADMIN_KEY": ADA, **trusts}
        done = CliRunner().invoke(main, asked, env=known)
        assert done.exit_code == 0, done.output
        done = CliRunner().invoke(main, asked, env={**known, "SERVANDA_CA_FILE": ""})
        assert done.exit_code == 4
        assert "certificate verify failed" in done.output
        assert "SERVANDA_CA_FILE=FILE trusts the certificates in FILE" in done.output

        words = ("--leader", first.page, "--name", "gateway-2")
        environ = {**trusts, "SERVANDA_GATEWAY_KEY": gate}
        with Serving(folder_of_second, pools, *words, **environ) as second:
            second.begun()
            assert second.url.startswith("http://")


@pytest.mark.slow
def test_keys_and_certificate_change_while_it_serves(tmp_path, authority, pools, trusts):
    folder = tmp_path / "serve"
    with serving(folder, authority, pools, **trusts) as gateway:
        gateway.begun()

        def status(user):
            with gateway.client() as client:
                return ask(client, "a", user)[1]

        assert status(0) == 200
        write(folder / "keys.yaml", row("new", key(1)) + row("eve", ADA + "-2", "admin"))
        until(lambda: status(0) == 401, "the removed key is refused")
        assert status(1) == 200
        until(lambda: told(gateway, ADA) == 401, "the leader refuses it too")
        assert told(gateway, ADA + "-2") == 200

        # clients that trust the new authority alone: both listeners have its certificate
        renewed = trustme.CA()
        issued(folder, renewed, "127.0.0.1")
        gateway.verify = context_of(renewed)
        until(lambda: reached(gateway, gateway.url), "users are shown the new certificate")
        until(lambda: reached(gateway, gateway.page), "so is who asks the leader")
        assert status(1) == 200
        # the gateway asks its own leader on
        before = gateway.status(ADA + "-2")["gateways"][0]
        until(lambda: gateway.status(ADA + "-2")["gateways"][0] != before, "it follows its leader")
        assert gateway.end() == 0


def told(gateway, holder):
    headers = {"authorization": f"Bearer {holder}"}
    return httpx2.get(
        f"{gateway.page}/v1/status", headers=headers, verify=gateway.verify
    ).status_code


def reached(gateway, url):
    try:
        return httpx2.get(f"{url}/healthz", verify=gateway.verify).status_code
    except httpx2.ConnectError:
        return 0


def refused(folder, *words, **environ):
    with Serving(
        folder, ("http://127.0.0.1:9", "http://127.0.0.1:9"), *words, **environ
    ) as program:
        code = program.process.wait(120)
        program._thread.join()
        return code, program.text


@pytest.mark.slow
def test_mistakes_end_it_before_anybody_is_served(tmp_path, authority, pools, trusts):
    folder = tmp_path / "serve"
    folder.mkdir()
    chain, private = issued(folder, authority, "127.0.0.1")
    other = tmp_path / "other"
    other.mkdir()
    _, another = issued(other, authority, "127.0.0.1")

    code, said = refused(folder, "--tls-key", private)
    assert code == 2 and "give --tls-cert too" in said
    code, said = refused(folder, "--tls-cert", chain, "--tls-key", another)
    assert code == 2 and "are no certificate with its private key: key values mismatch" in said
    code, said = refused(folder, "--tls-cert", chain)
    assert code == 2 and "no certificate with its private key" in said
    code, said = refused(folder, "--tls-cert", chain, "--tls-key", folder / "gone.pem")
    assert code == 2 and "gone.pem cannot be read: No such file or directory" in said
    code, said = refused(folder, SERVANDA_CA_FILE=str(folder / "gone.pem"))
    assert code == 2 and "SERVANDA_CA_FILE names" in said and "serving users at" not in said


@pytest.mark.slow
def test_a_pool_whose_certificate_nobody_trusts_is_told(tmp_path, pools):
    with Serving(tmp_path / "serve", pools, SERVANDA_CA_FILE="") as gateway:
        gateway.line(
            r"! infer does not respond yet.* cannot be reached by TLS: .*CERTIFICATE_VERIFY"
        )
        gateway.line(r"SERVANDA_CA_FILE=FILE trusts")
        with gateway.client() as client:
            assert ask(client, "a")[1] == 502
