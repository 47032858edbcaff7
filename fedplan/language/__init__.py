# SPDX-License-Identifier: Apache-2.0
"""Parts, turns and plans: the words, their text, and the roles that follow."""

from typing import TYPE_CHECKING

from fedplan.faces import face

if TYPE_CHECKING:
    from fedplan.language.parser import parse, parse_part
    from fedplan.language.plan import (
        Plan,
        Role,
        best,
        by,
        chain,
        cycle,
        freeze,
        hold,
        keep,
        share,
        when,
    )
    from fedplan.language.resolution import Resolver, check, permitted, resolve
    from fedplan.language.turn import Turn, after, client_in, phase, trait

__all__ = [
    "Plan",
    "Resolver",
    "Role",
    "Turn",
    "after",
    "best",
    "by",
    "chain",
    "check",
    "client_in",
    "cycle",
    "freeze",
    "hold",
    "keep",
    "parse",
    "parse_part",
    "permitted",
    "phase",
    "resolve",
    "share",
    "trait",
    "when",
]

__getattr__, __dir__ = face(
    __name__,
    {
        "parser": "parse parse_part",
        "plan": "Plan Role best by chain cycle freeze hold keep share when",
        "resolution": "Resolver check permitted resolve",
        "turn": "Turn after client_in phase trait",
    },
)
