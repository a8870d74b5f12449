"""`bf16_stream`: y = x @ w.T on tensor cores with the weight as the wide operand (Triton). See README.md."""
