"""Which implementation runs: one ordered table per op, and the reason for each refusal."""

from kvkern.backends.table import (
    TABLE,
    Backend,
    DecodeCall,
    MatmulCall,
    WeightOnlyCall,
    choose,
    explain,
    takes_e4m3_queries,
)

__all__ = [
    "TABLE",
    "Backend",
    "DecodeCall",
    "MatmulCall",
    "WeightOnlyCall",
    "choose",
    "explain",
    "takes_e4m3_queries",
]
