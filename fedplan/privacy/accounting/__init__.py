# SPDX-License-Identifier: Apache-2.0
"""Privacy accounting: events, epsilon of their composition, and the budget of charges."""
