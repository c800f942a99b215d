"""Optional: the GPU decodes JPEG files, crops, resizes and augments them."""
