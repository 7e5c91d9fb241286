"""Train DSpark drafts: prompts, the target's answers and features, the draft, its calibration and its evaluation.

Imports torch and transformers lazily through its modules; never SGLang.
"""
