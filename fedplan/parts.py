# SPDX-License-Identifier: Apache-2.0
"""Names of model parts for plans: `from fedplan.parts import query, key, head`."""

from fedplan.language.parts import *  # noqa: F403
