# SPDX-License-Identifier: Apache-2.0
"""Charts from plain numbers, drawn by matplotlib, each as SVG, PNG, PDF and CSV."""
