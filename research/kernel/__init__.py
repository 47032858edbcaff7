# SPDX-License-Identifier: Apache-2.0
"""The kernel lab: federated linear attention in float64, where freezing can be computed exactly."""
