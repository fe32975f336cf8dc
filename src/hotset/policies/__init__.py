"""Cache policies behind one contract: static, LRU, LFU, EMA, look-ahead, Belady."""
