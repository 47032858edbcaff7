# SPDX-License-Identifier: Apache-2.0
"""Attacks on what leaves a client: tried on tiny models, so that a user sees what privacy buys."""
