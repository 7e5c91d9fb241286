"""`sglang-dspark bench`: controls before and after every treatment, SGLang's own load generator, and a receipt."""
