"""Models as files and as Transformers modules: checkpoints, their fingerprint, and where their experts are."""
