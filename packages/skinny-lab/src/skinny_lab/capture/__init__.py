"""`skinny capture`: which dense projections a running model really issues, as a JSON file.

>>> from skinny_lab import capture
>>> capture.read("smollm2.json").shapes()  # doctest: +SKIP
{(576, 576): {1, 3}, (1536, 576): {1, 3}, ...}
"""

from __future__ import annotations

from skinny_lab.capture.document import Capture, CaptureError, Record, read, write

__all__ = ["Capture", "CaptureError", "Record", "read", "write"]
