"""What operators see: counters, /lookahead_kv/stats, Prometheus, the selection trace."""
