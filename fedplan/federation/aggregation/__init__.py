# SPDX-License-Identifier: Apache-2.0
"""Aggregation of updates: an `Aggregation` for the run, and its `Aggregator` of each round."""
