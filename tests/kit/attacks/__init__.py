# SPDX-License-Identifier: Apache-2.0
"""Attacks on updates and releases of tiny federations: what leaks with and without privacy."""
