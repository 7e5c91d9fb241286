"""Prompts from packaged sources, for training, evaluation and benchmarks."""
