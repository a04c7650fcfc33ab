"""The training state of every rank in host memory that outlives the ranks: arenas of the checkpoint engine."""
