"""`skinny explain`: resolve the request, let the core explain, show it."""

from __future__ import annotations

import json
import warnings

from skinny_core.explain import explain
from skinny_lab import output
from skinny_lab.explain import target, view


def run(model: str, *, device: str | None, tp: int, rows: str, cells: bool, as_json: bool) -> None:
    """Print the explanation. Raises a `SkinnyError` for a request that cannot be met."""
    ms = target.find_rows(rows)
    found = target.find_model(model)
    key, note = target.find_device(device, found.package)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # what the plan reader warns of is among the notes shown here
        explanation = explain(found.name, found.package, found.config, tp=tp, key=key, ms=ms)
    if as_json:
        saving = {str(m): round(explanation.saving_us(m), 2) for m in ms}
        output.print_json({"schema": 1, **json.loads(explanation.to_json()), "saving_us_per_step": saving})
        return
    console = output.console()
    for block in view.blocks(explanation, ms, note, cells=cells):
        console.print(block)
