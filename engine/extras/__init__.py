"""Optional: label suspects, expected accuracy of a recipe, fine-tuning, profiler."""
