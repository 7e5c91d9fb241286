"""Processes of a plain CPU: how they start, which cores they use, and what they keep."""
