"""The `skinny` command: what runs, why, and how fast. `skinny --help` is the place to start."""
