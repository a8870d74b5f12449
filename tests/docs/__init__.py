"""Documents that are run."""
