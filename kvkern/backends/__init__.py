"""Which implementation runs: one ordered table per op, and the reason for each refusal."""

from kvkern.backends.table import TABLE, Backend, DecodeCall, choose, explain

__all__ = ["TABLE", "Backend", "DecodeCall", "choose", "explain"]
