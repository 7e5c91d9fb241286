"""What plain SGLang must be taught so that speculation is invisible: one hook, or a few, for each fault."""
