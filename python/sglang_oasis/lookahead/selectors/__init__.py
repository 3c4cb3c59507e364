"""How blocks are ranked for a query."""
