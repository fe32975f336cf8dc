"""Planning: strategies, budgets, bounds."""
