# SPDX-License-Identifier: Apache-2.0
"""The plan language: parts, conditions and plans, their parser, and plans resolved to roles."""

from typing import TYPE_CHECKING

from fedplan.lazy import lazy_exports

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
    from fedplan.language.predicates import Turn, after, client_in, phase, trait
    from fedplan.language.resolution import Resolver, check_plan, permitted_roles, resolve

__all__ = [
    "Plan",
    "Resolver",
    "Role",
    "Turn",
    "after",
    "best",
    "by",
    "chain",
    "check_plan",
    "client_in",
    "cycle",
    "freeze",
    "hold",
    "keep",
    "parse",
    "parse_part",
    "permitted_roles",
    "phase",
    "resolve",
    "share",
    "trait",
    "when",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "predicates": "Turn after client_in phase trait",
        "parser": "parse parse_part",
        "plan": "Plan Role best by chain cycle freeze hold keep share when",
        "resolution": "Resolver check_plan permitted_roles resolve",
    },
)
