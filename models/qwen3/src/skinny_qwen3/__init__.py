"""Qwen3 for skinny: shapes, call sites, plans and parity. The names other wheels use are in `skinny_qwen3.package`."""
