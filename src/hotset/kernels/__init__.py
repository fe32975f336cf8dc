"""Host expert kernels, compiled on first use for this CPU."""
