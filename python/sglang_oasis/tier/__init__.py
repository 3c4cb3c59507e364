"""Memory and bookkeeping of the tiers: host pool (L2), resident tier (L1), summaries; decides nothing about them."""
