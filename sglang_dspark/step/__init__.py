"""One decode step, from budget to commit: worker, policies, drafter, verifier, acceptance."""
