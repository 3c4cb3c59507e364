"""Every touch of an SGLang internal, one file per seam, each naming the symbol and the version it was read from."""
