"""The public ops: contract, checks, choice of backend; one file a family.

They compute forwards only: no result requires a gradient, and autocast changes none.
"""
