"""Benchmarks: ``python benchmarks/run.py``. Not part of the installed package."""
