# SPDX-License-Identifier: Apache-2.0
"""A site's own word: what it is, what it approves of, and what it answers."""
