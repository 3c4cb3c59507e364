"""Decides what is resident and when it is fetched: selectors, capped eviction, pipelines. Knows no memory layout."""
