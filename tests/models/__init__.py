"""What every model package promises, asked of each that is in the workspace."""
