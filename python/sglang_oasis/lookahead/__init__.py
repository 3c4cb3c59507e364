"""What to keep resident and when to fetch it: selectors, capped eviction, the background pipeline. No memory layout."""
