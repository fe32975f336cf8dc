"""Placement: budgets, objectives, strategies, proofs. Pure functions from a trace or counts to a Plan."""
