"""Tests that span wheels."""
