"""What a user may choose. Nothing here imports torch, so a mistake is answered in under a second."""
