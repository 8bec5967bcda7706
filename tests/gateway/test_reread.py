# Keys and certificates whose files are written while they are in use.

import ssl
from pathlib import Path

import pytest
import trustme
from cryptography.hazmat.primitives import serialization

from servanda.engines.tls import VARIABLE, Certificate, trusted
from servanda.errors import ContractError
from servanda.gateway.http.api_keys import Holder, Keys
from servanda.gateway.http.reload import ListenerFiles

ANNA, BOB, GATE = "anna-key-0123456789", "bob-key-01234567890", "gate-key-0123456789"


def row(name, key, role="client"):
    return f'- {{name: {name}, role: {role}, key: "{key}"}}\n'


def write(file, text, mode=0o600):
    """As an editor or a mounted secret does it: another file takes the place of the first."""
    new = file.with_suffix(".new")
    new.write_text(text, encoding="utf-8")
    new.chmod(mode)
    new.replace(file)


@pytest.fixture
def files(tmp_path):
    """A file of keys that has anna's, what reads it, a look at it, and what was said."""
    file, said = tmp_path / "keys.yaml", []
    write(file, row("anna", ANNA))
    found = ListenerFiles(str(file), None, said.append, [("own", "gateway", GATE)])
    return file, found, found.read_changed, said


def who(keys, key):
    holder = keys.who(f"Bearer {key}")
    return holder and holder.name


def test_a_key_that_is_added_is_known_and_one_that_is_removed_is_not(files):
    file, found, look, said = files
    look()
    assert said == []  # nothing was written

    write(file, row("anna-2", BOB) + row("anna", ANNA))
    look()
    look()
    assert who(found.keys, ANNA) == "anna" and who(found.keys, BOB) == "anna-2"

    write(file, row("anna-2", BOB))
    look()
    look()
    assert who(found.keys, ANNA) is None and who(found.keys, BOB) == "anna-2"
    assert found.keys.who(f"Bearer {GATE}") == Holder("own", "gateway")  # it is in no file
    assert said == [f"{file} was read again: it has {n} keys" for n in (2, 1)]


def test_a_file_that_is_just_being_written_is_left_alone(files):
    file, found, look, said = files
    for text in (row("bob", BOB), row("bob", BOB) + "- {na", row("bob", BOB) + row("anna", ANNA)):
        file.write_text(text, encoding="utf-8")
        look()  # it differs from the look before each time
        assert said == [] and who(found.keys, ANNA) == "anna"
    file.unlink()
    look()
    look()
    assert said == [] and who(found.keys, ANNA) == "anna"
    write(file, row("anna", ANNA) + row("bob", BOB))
    look()
    look()
    assert who(found.keys, BOB) == "bob"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("- {name: anna, role: king, key: 0123456789abcdef}\n", "keys.yaml:1:22: a holder needs"),
        ("", "not a list of keys in YAML"),
        ("- {name: anna", "keys.yaml:"),
        (row("ann", ANNA, "viewer"), "no key has the role client any more"),
    ],
)
def test_a_file_that_cannot_be_used_changes_nothing_and_is_told_once(files, text, why):
    file, found, look, said = files
    write(file, text)
    for _ in range(4):
        look()
    assert len(said) == 1 and "what was read before stays in use" in said[0] and why in said[0]
    assert ANNA not in said[0]
    assert who(found.keys, ANNA) == "anna" and found.keys.clients


def test_on_demand_it_is_read_though_it_has_not_changed(files, monkeypatch):
    file, found, look, said = files
    monkeypatch.setenv("ANNAS", ANNA)
    write(file, "- {name: anna, role: client, key_env: ANNAS}\n", 0o644)
    look()
    look()
    del said[:]
    found.demand()
    look()
    look()
    (line,) = said
    assert line.startswith(f"{file} was read again") and "chmod 600" in line
    file.unlink()
    found.demand()
    look()
    assert "cannot be used" in said[-1] and who(found.keys, ANNA) == "anna"


def test_keys_that_nobody_needed_may_come_to_be_needed():
    keys = Keys()
    keys.take(Keys(("anna", "client", ANNA)))
    assert keys.clients and who(keys, ANNA) == "anna"


# Certificates.


def shown(server, client, name="localhost"):
    """The certificate that a listener shows a client; raises ssl.SSLError where it refuses it."""
    there, here = ssl.MemoryBIO(), ssl.MemoryBIO()
    listening = server.wrap_bio(there, here, server_side=True)
    asking = client.wrap_bio(here, there, server_hostname=name)
    ends = [asking, listening]
    for _ in range(20):
        for end in list(ends):
            try:
                end.do_handshake()
                ends.remove(end)
            except ssl.SSLWantReadError:
                pass
    assert not ends
    return asking.getpeercert(binary_form=True)


def issued(folder, authority, name="localhost"):
    """The files of a new certificate: (chain, key)."""
    made = authority.issue_cert(name)
    chain, key = folder / "chain.pem", folder / "key.pem"
    write(chain, "".join(part.bytes().decode() for part in made.cert_chain_pems))
    write(key, made.private_key_pem.bytes().decode())
    return chain, key


@pytest.fixture(scope="module")
def authority():
    return trustme.CA()


@pytest.fixture
def trusting(authority, tmp_path):
    file = tmp_path / "ca.pem"
    file.write_bytes(authority.cert_pem.bytes())
    return trusted({VARIABLE: str(file)})


def test_a_certificate_that_is_renewed_is_shown_from_then_on(tmp_path, authority, trusting):
    chain, key = issued(tmp_path, authority)
    said = []
    found = ListenerFiles(None, (str(chain), str(key)), said.append)
    first = shown(found.certificate.context, trusting)
    assert found.scheme == "https" and shown(found.certificate.context, found.certificate.pinned)

    issued(tmp_path, authority)
    for _ in range(3):
        found.read_changed()
    assert said == [f"{chain} was read again: new connections are shown its certificate"]
    second = shown(found.certificate.context, trusting)
    assert second != first
    assert shown(found.certificate.context, found.certificate.pinned) == second


def test_a_renewal_that_fails_leaves_the_certificate_of_before(tmp_path, authority, trusting):
    chain, key = issued(tmp_path, authority)
    said = []
    found = ListenerFiles(None, (str(chain), str(key)), said.append)
    first = shown(found.certificate.context, trusting)

    write(chain, authority.issue_cert("localhost").cert_chain_pems[0].bytes().decode())
    for _ in range(3):
        found.read_changed()
    assert len(said) == 1 and "key values mismatch" in said[0]
    assert shown(found.certificate.context, trusting) == first


def test_a_pinned_certificate_is_that_one_whatever_its_name(tmp_path, authority):
    chain, key = issued(tmp_path, authority, "gateway.example")
    pinned = Certificate(chain, key).pinned
    assert shown(Certificate(chain, key).context, pinned, "127.0.0.1")
    (tmp_path / "another").mkdir()
    another = Certificate(*issued(tmp_path / "another", authority, "gateway.example"))
    with pytest.raises(ssl.SSLCertVerificationError):  # of the same authority, and the same name
        shown(another.context, pinned, "127.0.0.1")


def test_own_certificates_are_trusted_beside_those_of_the_machine(tmp_path, authority, trusting):
    assert len(trusting.get_ca_certs()) >= len(trusted({}).get_ca_certs())
    certificate = Certificate(*issued(tmp_path, authority))
    assert shown(certificate.context, trusting)
    with pytest.raises(ssl.SSLCertVerificationError):
        shown(certificate.context, trusted({}))
    with pytest.raises(ssl.SSLCertVerificationError):
        shown(certificate.context, trusting, "elsewhere.example")


def test_one_file_may_have_certificate_and_key(tmp_path, authority, trusting):
    file = tmp_path / "both.pem"
    file.write_bytes(authority.issue_cert("localhost").private_key_and_cert_chain_pem.bytes())
    assert shown(Certificate(file).context, trusting)


@pytest.mark.parametrize("text", ["", "-----BEGIN CERTIFICATE-----\nAAAA\n", None])
def test_a_file_without_certificates_to_trust_is_refused(tmp_path, text):
    file = tmp_path / "ca.pem"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ContractError, match=f"{VARIABLE} names .*ca.pem, and no certificates"):
        trusted({VARIABLE: str(file)})


def encrypted(key):
    loaded = serialization.load_pem_private_key(key.read_bytes(), None)
    hidden = serialization.BestAvailableEncryption(b"secret")
    kind = serialization.PrivateFormat.PKCS8
    key.write_bytes(loaded.private_bytes(serialization.Encoding.PEM, kind, hidden))


@pytest.mark.parametrize(
    ("spoilt", "spoil", "why"),
    [
        ("key.pem", Path.unlink, r"key\.pem cannot be read: No such file"),
        ("chain.pem", Path.unlink, r"chain\.pem cannot be read: No such file"),
        ("chain.pem", lambda file: file.write_text("x"), "are no certificate with its private key"),
        ("key.pem", lambda file: file.write_text(""), "are no certificate with its private key"),
        ("key.pem", encrypted, "the private key is encrypted"),
    ],
)
def test_a_certificate_that_cannot_be_used_is_refused(tmp_path, authority, spoilt, spoil, why):
    chain, key = issued(tmp_path, authority)
    spoil(tmp_path / spoilt)
    with pytest.raises(ContractError, match=why):
        Certificate(chain, key)
