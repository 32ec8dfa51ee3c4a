"""The same ops in plain PyTorch, on any device, up to fp64: the specification."""
