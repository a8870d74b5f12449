"""Llama 3.1 for skinny: shapes, call sites, plans and parity. The names other wheels use are in
`skinny_llama31.package`."""
