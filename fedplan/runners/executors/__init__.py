# SPDX-License-Identifier: Apache-2.0
"""Executors: run the clients of a simulation in this process, in a process pool, or on Ray."""
