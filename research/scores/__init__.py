# SPDX-License-Identifier: Apache-2.0
"""Which reading of SAFL's score tells which blocks a task needs: see research/pages/scores.md."""
