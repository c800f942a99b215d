"""Report on a run: console, metrics.jsonl, TensorBoard, telemetry, verdict, observers."""
