# SPDX-License-Identifier: Apache-2.0
"""The study that a simulated server offers, which sites parse and check once, not for each message."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
from setting import Setting, agreement_of
from sites import study_text

from fedplan.sites import approvals, gateway, inbox
from fedplan.sites.policy import Policy
from fedplan.studies.schema import Study, parse_toml, study_from_dict


@cache
def study_of(rounds: int, *, changed: bool = False) -> Study:
    """The study that the server offers; only its digest and its rounds count.

    `changed`: as an operator's mistake changes it, with more rounds than the sites allow.
    """
    rounds, train = rounds + changed, f"lr = {0.5 if changed else 1.0}"
    text = study_text(privacy="", rounds=rounds, train=train) + "[evaluate]\non_clients = true\n"
    return study_from_dict(parse_toml(text.replace("holdout_fraction = 0.0", "")))


@contextmanager
def remembered(setting: Setting) -> Iterator[None]:
    """Parse each study and each policy once, and build no model to check them."""

    def study_from(fields: dict[str, Any]) -> Study:
        return _parsed_study(repr(fields))

    with pytest.MonkeyPatch.context() as patch:
        for module in (inbox, gateway):
            patch.setattr(module, "study_from_dict", study_from)
        patch.setattr(approvals, "read_policy", lambda file: _parsed_policy(file.read_text()))
        patch.setattr(approvals, "outline_agreement", lambda _: agreement_of(setting))
        for schema, name in ((Study, "full_digest"), (Study, "digest"), (Policy, "digest")):
            patch.setattr(schema, name, property(_once(schema, name)))
        yield


@cache
def _parsed_study(text: str) -> Study:
    return study_from_dict(ast.literal_eval(text))


@cache
def _parsed_policy(text: str) -> Policy:
    return Policy.model_validate(parse_toml(text))


_digests = dict[tuple[int, str], str]()


@cache
def _once(schema: type, name: str) -> Any:
    """A property of a schema, computed once for each object, all of which are remembered."""
    plain = vars(schema)[name].fget

    def digest(value: Any) -> str:
        if (id(value), name) not in _digests:
            _digests[id(value), name] = plain(value)
        return _digests[id(value), name]

    return digest
