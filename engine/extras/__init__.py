"""Optional: expected accuracy of a recipe, fine-tuning, profiler."""
