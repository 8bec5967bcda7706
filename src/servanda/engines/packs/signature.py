# Signatures of packs, in the format of ssh-keygen -Y: people have the keys, an agent or a hardware
# token may hold them, and `ssh-keygen -Y verify` shows the same without Servanda.

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path
from typing import IO

from servanda.errors import ContractError, MeasurementError

SIGNERS = "SERVANDA_PACK_SIGNERS"  # names a file, as the option --signers does
NAMESPACE = "servanda-pack"


def sign(file: Path, key: Path) -> bytes:
    """The signature of a file.

    Args:
        key: a private key, or a public one whose private key is in an agent.

    Raises:
        ContractError: there is no such key, or it cannot sign.
        MeasurementError: there is no ssh-keygen.
    """
    if not key.is_file():
        raise ContractError(f"there is no key {key}", hint="make one: ssh-keygen -t ed25519")
    with file.open("rb") as content:
        done = _run(["-Y", "sign", "-n", NAMESPACE, "-f", str(key)], content)
    if done.returncode:
        raise ContractError(
            f"{key} did not sign {file}: {_reason(done)}",
            hint="give a private key without a passphrase, or the public key of one in ssh-agent",
        )
    return done.stdout


def verify(file: Path, signature: bytes | None, signers: Path, name: str) -> str:
    """Who signed a file, as `signers` names them.

    Args:
        signers: lines of NAME KEY, as ALLOWED SIGNERS of ssh-keygen(1).
        name: of the pack, for messages.

    Raises:
        ContractError: `signers` cannot be read.
        MeasurementError: it is not signed, by another key, or the file is not what was signed.
    """
    if not signers.is_file():
        raise ContractError(
            f"there is no file {signers} of keys that may sign packs",
            hint=f"--signers or {SIGNERS} names one; a line is NAME ssh-ed25519 KEY",
        )
    if signature is None:
        raise MeasurementError(
            f"{name} is not signed, and {signers} asks for a signature",
            hint="push it with --sign KEY, or leave --signers out",
        )
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder) / "signature"
        kept.write_bytes(signature)
        common = ["-n", NAMESPACE, "-s", str(kept), "-f", str(signers)]
        found = _run(["-Y", "find-principals", *common])
        who = found.stdout.decode(errors="replace").partition("\n")[0]
        if found.returncode or not who:
            raise MeasurementError(
                f"{name} is signed by a key that {signers} does not have: {_reason(found)}",
                hint="add the signer's key if you trust it",
            )
        with file.open("rb") as content:
            done = _run(["-Y", "verify", "-I", who, *common], content)
    if done.returncode:
        raise MeasurementError(
            f"the signature of {name} by {who} is not valid: {_reason(done)}",
            hint="it may be of another pack: push it again with --sign",
        )
    return who


def _run(
    arguments: list[str], content: IO[bytes] | int = subprocess.DEVNULL
) -> subprocess.CompletedProcess[bytes]:
    try:
        return subprocess.run(
            ["ssh-keygen", *arguments], stdin=content, capture_output=True, check=False
        )
    except FileNotFoundError:
        raise MeasurementError(
            "packs are signed and verified by ssh-keygen, which is not installed",
            hint="install OpenSSH 8.2 or newer, such as openssh-client",
        ) from None


def _reason(done: subprocess.CompletedProcess[bytes]) -> str:
    text = (done.stderr or done.stdout).decode(errors="replace").strip()
    return (text.splitlines() or ["it said nothing"])[-1]
