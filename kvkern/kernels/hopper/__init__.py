"""Gluon kernels for compute capability 9.0, each with a plain-Triton twin in kvkern.kernels."""
