"""Every name of SGLang that we touch: hooks on its functions, a table of the rest, and the check of both at the start."""
