# SPDX-License-Identifier: Apache-2.0
"""Decisions: a question that is committed before its runs, and the verdict that they give."""
