# SPDX-License-Identifier: Apache-2.0
"""The record of a run, and the stream of its events."""
