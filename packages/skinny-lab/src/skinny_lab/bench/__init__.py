"""Measuring: races of one projection, cells from measurements, plans of models, rows and summaries."""

from __future__ import annotations
