"""`bf16_simt`: dot products along K on the FP32 units, BF16/FP16 in, for the fewest tokens. See README.md beside
this.
"""
