"""Every shipped cell on a real GPU, and the gate that makes a session without GPU tests red."""
