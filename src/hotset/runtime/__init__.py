"""Running a model with its experts split between tiers."""
