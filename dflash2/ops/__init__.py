"""Operations on tensors: one module each, with its torch reference; the Triton kernels are loaded on first use."""
