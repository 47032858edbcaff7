# SPDX-License-Identifier: Apache-2.0
"""The benchmark: rounds of fedplan, bare torch, pfl and stock Flower on the same work."""
