"""Traces: file format, recording, importing, statistics."""
