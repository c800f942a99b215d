"""What a training loop needs around the step. The loop itself is in train.py."""
