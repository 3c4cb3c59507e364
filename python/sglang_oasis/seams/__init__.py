"""All hooks on SGLang's internals, one file per seam; each names the symbol and the version that it was read from."""
