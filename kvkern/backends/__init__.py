"""Which implementation runs: one ordered table per op, and the reason for each refusal."""

from kvkern.backends.again import TakesTensors
from kvkern.backends.table import (
    TABLE,
    AbsorbCall,
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
    "AbsorbCall",
    "Backend",
    "DecodeCall",
    "MatmulCall",
    "TakesTensors",
    "WeightOnlyCall",
    "choose",
    "explain",
    "takes_e4m3_queries",
]
