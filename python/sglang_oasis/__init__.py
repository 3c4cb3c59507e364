"""sglang-oasis: long-context serving beyond device memory for stock SGLang."""

__version__ = "0.1.0"
SUPPORTED_SGLANG_VERSION = "0.5.23"
