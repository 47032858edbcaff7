# SPDX-License-Identifier: Apache-2.0
"""Runners: what carries the rounds. Each calls the same push, local and pull."""
