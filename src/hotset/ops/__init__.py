"""Remapping routed expert ids to arena slots, and shedding: one contract, several implementations."""
