"""Measure speed: the kernels against the memory roofline, decoding against Transformers."""
