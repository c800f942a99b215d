"""Optional: layers rewritten for compiled bf16 on a GPU."""
