"""Code that tests and benchmarks share: servers, texts, an independent reference, test doubles."""
