"""The command line: parse, one public call, render."""
