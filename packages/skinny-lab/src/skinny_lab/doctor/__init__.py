"""`skinny doctor`: facts about this installation, as text or JSON."""
