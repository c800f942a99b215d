"""Components that the training loop in train.py needs around the step."""
