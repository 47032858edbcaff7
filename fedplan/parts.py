# SPDX-License-Identifier: Apache-2.0
"""The words for parts of a Transformer: `from fedplan.parts import query, key, head`."""

from fedplan.language.parts import *  # noqa: F403
