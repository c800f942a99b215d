"""What observes a run: console, metrics.jsonl, TensorBoard, telemetry and observers."""
