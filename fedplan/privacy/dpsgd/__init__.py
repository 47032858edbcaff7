# SPDX-License-Identifier: Apache-2.0
"""DP-SGD: training with example-level differential privacy."""
