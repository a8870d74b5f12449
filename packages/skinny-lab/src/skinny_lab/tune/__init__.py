"""`skinny tune`: measure a model's shapes, or one's own, on this machine and write a user plan."""
