# SPDX-License-Identifier: Apache-2.0
"""Mechanisms of differential privacy: clipping, sampling, Gaussian noise and noisy votes."""
