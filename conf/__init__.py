"""The configuration. It does not import torch, so that errors appear in under a second."""
