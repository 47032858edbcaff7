# SPDX-License-Identifier: Apache-2.0
"""Tasks: a class for each kind of task, and functions to make a task from its kind."""
