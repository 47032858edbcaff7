# SPDX-License-Identifier: Apache-2.0
"""Models that fedplan builds itself: classifiers of pictures by the texts of their classes."""
