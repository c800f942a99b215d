"""Optional: what only a classifier has: tables and pictures of its classes, and label suspects."""
