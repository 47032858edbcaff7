# SPDX-License-Identifier: Apache-2.0
"""The `fedplan` command: each module holds a group of commands and adds them to `app`."""

from importlib import import_module

from fedplan.cli.console import app, main

for _module in ("models", "studies", "runs", "sweeps", "audits", "server", "site"):
    import_module(f"fedplan.cli.{_module}")  # in the order of `fedplan --help`

__all__ = ["app", "main"]
