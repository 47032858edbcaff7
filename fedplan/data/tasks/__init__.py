# SPDX-License-Identifier: Apache-2.0
"""Tasks: a class for each kind of task, and functions to make a task from its kind."""

CHUNK_LOGITS = 2**23
"""Most logits of a language model that are computed at a time; a batch with fewer is one chunk."""
