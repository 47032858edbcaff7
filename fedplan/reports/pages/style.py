# SPDX-License-Identifier: Apache-2.0
"""The style sheet of pages: light, dark, narrow screens and print."""

from __future__ import annotations

from fedplan.reports.figures.drawing import FONTS
from fedplan.reports.figures.palette import PALETTE, palette_css

_VARIABLES = ("ink", "faint", "grid", "paper", "c0", "c1", "c2")


def _values(background: int) -> str:
    """Return the CSS variables of the palette for a background: 0 is light, 1 is dark."""
    return " ".join(f"--{name}: {PALETTE[name][background]};" for name in _VARIABLES)


STYLE = f"""
:root {{ color-scheme: light dark; {_values(0)} }}
@media screen and (prefers-color-scheme: dark) {{ :root {{ {_values(1)} }} }}
{palette_css()}
* {{ box-sizing: border-box }}
body {{ margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.55 {FONTS} }}
main, header, footer {{ max-width: 70rem; margin: 0 auto; padding: 0 1.5rem }}
header {{ padding-top: 2.2rem }}
h1 {{ font-size: 1.9rem; line-height: 1.2; margin: 0 0 .6rem; text-wrap: balance }}
h2 {{ font-size: 1.25rem; margin: 2.6rem 0 .5rem; padding-top: 1rem;
  border-top: 1px solid var(--grid) }}
h3 {{ font-size: 1rem; margin: 1.4rem 0 .3rem }}
p, ul {{ max-width: 46rem; margin: .5rem 0 }}
ul {{ padding-left: 1.2rem }}
code {{ font: .88em ui-monospace, "SF Mono", Menlo, Consolas, monospace; overflow-wrap: anywhere }}
.state {{ display: inline-block; font-weight: 600; border: 1.5px solid; border-radius: 1rem;
  padding: .05rem .7rem; margin-right: .4rem }}
.good {{ color: var(--c2) }} .bad {{ color: var(--c1) }} .live {{ color: var(--c0) }}
.faint, figcaption, footer {{ color: var(--faint); font-size: .9rem }}
.tiles {{ display: flex; flex-wrap: wrap; gap: .6rem 2.2rem; margin: 1.1rem 0 0 }}
.tiles dt {{ color: var(--faint); font-size: .85rem }}
.tiles dd {{ margin: 0; font-size: 1.5rem; font-weight: 600; line-height: 1.2 }}
.figures {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 25rem), 1fr));
  gap: 1.2rem 2rem; margin: .8rem 0 }}
figure {{ margin: 0; min-width: 0 }}
figure.whole {{ grid-column: 1 / -1 }}
figure h3 {{ margin: 0 0 .3rem }}
figcaption {{ max-width: 46rem; margin-top: .3rem }}
svg {{ display: block; width: 100%; height: auto }}
svg text {{ font-family: inherit }}
.sheet {{ overflow-x: auto }}
figure.half svg {{ max-width: 36rem }}
.wide {{ overflow-x: auto; margin: .7rem 0 }}
table {{ border-collapse: collapse; font-size: .92rem; font-variant-numeric: tabular-nums }}
th, td {{ text-align: left; padding: .25rem 1rem .25rem 0; border-bottom: 1px solid var(--grid);
  vertical-align: top }}
th {{ color: var(--faint); font-weight: 600; white-space: nowrap }}
.n {{ text-align: right; white-space: nowrap }}
footer {{ margin-top: 3rem; padding-bottom: 2rem; border-top: 1px solid var(--grid);
  padding-top: .8rem }}
@media (max-width: 40rem) {{
  main, header, footer {{ padding-left: 1rem; padding-right: 1rem }}
  h1 {{ font-size: 1.5rem }}
  figure.whole svg {{ min-width: 52rem }}
}}
@media print {{
  body {{ font-size: 10.5pt }}
  main, header, footer {{ max-width: none; padding: 0 }}
  h2 {{ margin-top: 1.4rem; break-after: avoid }}
  h3 {{ break-after: avoid }}
  figure, tr, .audit {{ break-inside: avoid }}
  .figures {{ grid-template-columns: 1fr 1fr }}
  .sheet, .wide {{ overflow: visible }}
  * {{ print-color-adjust: exact; -webkit-print-color-adjust: exact }}
  @page {{ margin: 15mm }}
}}
"""
"""The style sheet of every page; it loads no external resources."""
