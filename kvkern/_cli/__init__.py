"""What ``python -m kvkern`` runs: one module a command. Imported only when the command is."""
