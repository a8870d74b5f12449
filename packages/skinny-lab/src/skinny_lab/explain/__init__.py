"""`skinny explain`: the core's explanation of a model, found by name or path and shown as tables or JSON."""
