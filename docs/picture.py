# SPDX-License-Identifier: Apache-2.0
"""Make the picture of the first page: the three papers' plans on the models that they are about."""

from __future__ import annotations

from pathlib import Path

from fedplan import Turn, params_of, parse
from fedplan.models.params import Block, Kind, Param
from fedplan.reports.role_figure import RoleFigure, draw_roles

CHOSEN = (2, 5, 9, 11)


def prompted_clip() -> tuple[Param, ...]:
    """CLIP with two levels of prompts in two modalities, and the attention that fuses them."""
    prompts = tuple(
        Param(f"{level}.{stack}", Kind.PROMPT, (4, width), stack=stack, depth=12,
              tags=frozenset({level}))
        for stack, width in (("text", 512), ("vision", 768))
        for level in ("common", "own")
    )  # fmt: skip
    fusion = tuple(
        Param(f"fusion.{kind}", kind, (512, 512), stack="fusion")
        for kind in (Kind.QUERY, Kind.KEY, Kind.VALUE, Kind.OUT)
    )
    clip = tuple(p for p in params_of("clip-vit-base-16") if p.stack)
    return clip + prompts + fusion


def main() -> None:
    vit, bert = params_of("vit-base-16"), params_of("bert-base")
    frozen = parse("chain(share(), when(after(20), freeze(query | key)))")
    safl = parse("chain(freeze(), share(head), best(4))")
    pfeddc = parse("chain(freeze(), share(prompt & common), keep(prompt & own | fusion))")
    scores = {Block("encoder", i): float(i in CHOSEN) for i in range(12)}
    draw_roles(
        [
            RoleFigure("FedFrozen on a ViT, rounds 1 to 20", vit, frozen, Turn(round=1)),
            RoleFigure("FedFrozen, from round 21", vit, frozen, Turn(round=21)),
            RoleFigure("SAFL on BERT: this client, this round", bert, safl, Turn(scores=scores)),
            RoleFigure("pFedDC on CLIP", prompted_clip(), pfeddc),
        ],
        Path(__file__).parent / "roles.png",
    )


if __name__ == "__main__":
    main()
