"""`python -m skinny_lab` is `skinny`."""

from __future__ import annotations

from skinny_lab.cli import main

main()
