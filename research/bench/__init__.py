# SPDX-License-Identifier: Apache-2.0
"""The bench: rounds of fedplan beside bare torch, pfl and stock Flower, on the same work."""
