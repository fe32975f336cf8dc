"""Machines: presets, measuring this one, and the cost model."""
