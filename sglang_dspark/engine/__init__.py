"""How SGLang sees us: the algorithm it registers, the names of it that we touch, and what cannot be served."""
