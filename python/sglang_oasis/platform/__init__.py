"""The out-of-tree CPU platform."""
