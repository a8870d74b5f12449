"""What the tree promises about its own shape: sizes, import arrows, environment variables."""
