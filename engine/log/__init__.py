"""What reports a run: console, metrics.jsonl, TensorBoard, telemetry, verdict, observers."""
