"""The public ops: contract, checks, choice of backend; one file a family."""
