"""sglang-dspark: SGLang, extended so that speculative decoding pays at every load."""

__version__ = "0.1.0"
