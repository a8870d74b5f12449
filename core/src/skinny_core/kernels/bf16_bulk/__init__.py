"""`bf16_bulk`: bulk copies into a shared-memory ring, tensor cores, one persistent grid. See README.md beside this."""
