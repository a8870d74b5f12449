"""`bf16_mma`: `mma.sync` fragments loaded straight from memory, BF16/FP16 in, M 1-32. See README.md beside this."""
