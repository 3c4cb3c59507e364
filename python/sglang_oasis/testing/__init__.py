"""What tests and benchmarks share: servers, texts, an independent reference, doubles."""
