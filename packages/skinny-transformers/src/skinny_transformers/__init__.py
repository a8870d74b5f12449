"""Measured kernels in any model made of `nn.Linear`: `install(model)`, `uninstall(model)`, `status(model)`.

Everything but the seam stays as it was: parameters, `state_dict`, tied weights, `save_pretrained`, hooks, adapters.
Calls that no measured cell covers go to `nn.Linear.forward` itself, with the same tensors."""

from __future__ import annotations

from skinny_transformers.install import install, status, uninstall
from skinny_transformers.report import LayerReport, Report

__all__ = ["LayerReport", "Report", "install", "status", "uninstall"]
