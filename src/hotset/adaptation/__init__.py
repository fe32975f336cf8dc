"""Online adaptation: the hotness tracker and the rebalancer."""
