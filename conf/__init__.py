"""The configuration. It imports no torch, so that a mistake is answered in under a second."""
