"""Datasets in the forms that scripts/prepare.py reads: `layouts` recognises them."""
