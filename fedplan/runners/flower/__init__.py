# SPDX-License-Identifier: Apache-2.0
"""The Flower runner: the same round between organisations. Only this folder imports flwr."""
