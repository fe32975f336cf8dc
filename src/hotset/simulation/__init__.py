"""Replay of a policy over a recorded trace."""
