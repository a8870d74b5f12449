"""Each wheel as a user gets it."""
