# SPDX-License-Identifier: Apache-2.0
"""Signatures of people under approvals, made and checked by OpenSSH with the keys of a policy."""

from __future__ import annotations

import re
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path
from subprocess import DEVNULL, PIPE
from typing import Annotated

from pydantic import AfterValidator, Field

from fedplan.errors import FedplanError

NAMESPACE = "fedplan-approval"
"""Namespace of the signatures, so that a signature made for another purpose is worth nothing."""
PERSON = r"^[a-z][a-z0-9._-]{0,63}$"
PUBLIC_KEY = r"^(sk-)?(ssh|ecdsa)-[a-z0-9@.-]+ [A-Za-z0-9+/=]+( [ -~]*)?$"


def _validate_person(name: str) -> str:
    if not re.fullmatch(PERSON, name):
        raise ValueError("name a person by lower-case letters, digits, dots and dashes, as ada")
    return name


def _validate_public_key(line: str) -> str:
    if not re.fullmatch(PUBLIC_KEY, line):
        raise ValueError(
            f"{line[:40]!r} is no OpenSSH public key: give the line of a file such as "
            "~/.ssh/id_ed25519.pub"
        )
    return line


PersonName = Annotated[
    str, AfterValidator(_validate_person), Field(json_schema_extra={"pattern": PERSON})
]
PublicKey = Annotated[
    str, AfterValidator(_validate_public_key), Field(json_schema_extra={"pattern": PUBLIC_KEY})
]
ARMOR = re.compile(
    r"-----BEGIN SSH SIGNATURE-----\n[A-Za-z0-9+/=\n]+-----END SSH SIGNATURE-----\n?"
)
MAX_SIGNATURE = 10_000
"""Characters that a signature may have."""


def sign_statement(text: str, key: Path) -> str:
    """Return a signature of a text by an OpenSSH key, which may ask for a passphrase or a touch.

    `key` is the file of a private key, or of a public one whose private key an agent has.
    """
    signed = _ssh_keygen("sign", "-f", str(key), text=text)
    if signed.returncode or not ARMOR.fullmatch(signed.stdout):
        raise FedplanError(f"ssh-keygen cannot sign with {key}: its message is above")
    return signed.stdout


@lru_cache(maxsize=256)
def is_signed(text: str, signature: str, key: str) -> bool:
    """Whether a signature of a text was made with the private key of a public key."""
    if len(signature) > MAX_SIGNATURE or not ARMOR.fullmatch(signature):
        return False
    with tempfile.TemporaryDirectory() as place:
        allowed, signed = Path(place, "allowed"), Path(place, "signature")
        allowed.write_text(f'signer namespaces="{NAMESPACE}" {key}\n')
        signed.write_text(signature)
        options = ("-f", str(allowed), "-I", "signer", "-s", str(signed))
        return _ssh_keygen("verify", *options, text=text, stderr=DEVNULL).returncode == 0


def _ssh_keygen(
    action: str, *options: str, text: str, stderr: int | None = None
) -> subprocess.CompletedProcess[str]:
    command = ["ssh-keygen", "-Y", action, "-n", NAMESPACE, *options]
    try:
        done = subprocess.run(  # noqa: S603 - no shell, and the text is no option
            command, input=text, stdout=PIPE, stderr=stderr, encoding="utf-8", check=False
        )
    except FileNotFoundError as error:
        raise FedplanError(
            "approvals of people with keys need the program ssh-keygen: install OpenSSH's client"
        ) from error
    if done.returncode < 0:  # it was killed, and says nothing of the signature
        raise FedplanError(f"ssh-keygen was ended by signal {-done.returncode}")
    return done
