# SPDX-License-Identifier: Apache-2.0
"""HTML pages: the report of runs, and the building blocks of all pages."""
