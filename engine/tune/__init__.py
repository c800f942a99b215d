"""Optional: measures decoder and workers for loader.workers=auto, and names the bottleneck."""
